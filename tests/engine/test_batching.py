"""Buckets and the layout of a padded batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftjax.engine.batching import make_batch
from swiftjax.engine.buckets import make_buckets
from swiftjax.engine.request import GenerationConfig
from tests.fakes import make_fake_core, make_request


@given(seqs=st.integers(1, 300), tokens=st.integers(1, 5000), fine=st.booleans(), data=st.data())
def test_every_step_finds_a_bucket(seqs: int, tokens: int, fine: bool, data: st.DataObject) -> None:
    buckets = make_buckets(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_pages=4, fine=fine,
    )  # fmt: skip
    num_seqs = data.draw(st.integers(1, seqs))
    num_tokens = data.draw(st.integers(num_seqs, max(num_seqs, tokens)))
    shape = buckets.choose(num_tokens, num_seqs)
    assert shape.num_tokens >= num_tokens and shape.num_seqs >= num_seqs
    assert (shape.num_tokens == shape.num_seqs) == (num_tokens == num_seqs)


def test_few_buckets() -> None:
    buckets = make_buckets(max_num_seqs=256, max_num_batched_tokens=8192, max_pages=128, fine=True)
    assert [b.num_seqs for b in buckets.decode] == [1, 8, 32, 64, 128, 256]
    assert [b.num_tokens for b in buckets.mixed] == [512, 768, 1024, 1536, 2048, 4096, 8192]
    assert len(set(buckets.all)) == len(buckets.all) <= 13
    coarse = make_buckets(max_num_seqs=8, max_num_batched_tokens=512, max_pages=128)
    assert [b.num_seqs for b in coarse.decode] == [1, 2, 4, 8]
    assert [b.num_tokens for b in coarse.mixed] == [32, 128, 512]


def test_layout_of_a_mixed_step() -> None:
    core = make_fake_core(num_pages=16, page_size=4, max_model_len=32)
    core.submit(make_request(core, [1, 2, 3], GenerationConfig(max_new_tokens=5)))
    core.step()
    config = GenerationConfig(temperature=0.5, top_k=3, top_p=0.9, seed=2**63 + 7)
    core.submit(make_request(core, [7] * 6, config))
    plan = core.scheduler.schedule(0.0)
    batch = make_batch(plan, core.scheduler.rows, core._buckets, page_size=4, num_slots=64)
    assert batch.token_ids[:8].tolist() == [4, 7, 7, 7, 7, 7, 7, 0]
    assert batch.positions[:7].tolist() == [3, 0, 1, 2, 3, 4, 5]
    assert batch.query_starts.tolist() == [0, 1, 7, 7, 7]
    assert batch.context_lens.tolist() == [4, 6, 0, 0]
    assert batch.prompt_lens.tolist() == [3, 6, 0, 0]
    assert batch.sample_rows.tolist() == [0, 6, 0, 0]
    assert batch.sampling.sample_positions.tolist() == [4, 6, 0, 0]
    assert batch.sampling.temperature.tolist() == [0.0, 0.5, 0.0, 0.0]
    assert batch.sampling.seeds[1].view(np.uint32).tolist() == [7, 2**31]
    assert set(batch.slot_mapping[7:].tolist()) == {64}
    slots = batch.slot_mapping[:7]
    pages = [batch.page_table[0, 0], *batch.page_table[1, :2]]
    assert slots.tolist() == [
        pages[0] * 4 + 3, *(pages[1] * 4 + i for i in range(4)), pages[2] * 4, pages[2] * 4 + 1,
    ]  # fmt: skip


@pytest.mark.parametrize("seqs", [1, 3, 4])
def test_decode_step_has_as_many_tokens_as_sequences(seqs: int) -> None:
    core = make_fake_core()
    for _ in range(seqs):
        core.submit(make_request(core, [1, 2], GenerationConfig(max_new_tokens=9)))
    core.step()
    plan = core.scheduler.schedule(0.0)
    batch = make_batch(plan, core.scheduler.rows, core._buckets, page_size=4, num_slots=256)
    assert batch.token_ids.shape == batch.context_lens.shape

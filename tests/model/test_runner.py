"""The compiled step: packing, donation, no recompilation, no weight-sized constants."""

import re

import jax
import numpy as np
import pytest

from swiftjax.batch import BatchShape, empty_batch
from swiftjax.engine.batching import make_buckets
from swiftjax.model.kv_cache import bytes_per_page
from swiftjax.model.packing import pack, packed_size, unpack
from tests.tiny import TINY, tiny_runner

SHAPES = [
    BatchShape(num_tokens=4, num_seqs=4, max_pages=8),
    BatchShape(num_tokens=32, num_seqs=4, max_pages=8),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_pack_and_unpack_are_inverse(shape: BatchShape) -> None:
    rng = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda x: rng.integers(-(2**31), 2**31, x.shape).astype(np.int32).view(x.dtype),
        empty_batch(shape, 64),
    )
    packed = pack(batch)
    assert packed.shape == (packed_size(shape),)
    back = jax.jit(lambda words: unpack(words, shape))(packed)
    for want, got in zip(jax.tree.leaves(batch), jax.tree.leaves(back), strict=True):
        assert want.dtype == got.dtype
        assert want.tobytes() == np.asarray(got).tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_kv_cache_is_donated_and_aliased(shape: BatchShape) -> None:
    """The step's cache and token counts are the caller's: same bytes in place, no copy."""
    runner = tiny_runner(num_pages=64, page_size=4)
    compiled = runner.lower(shape).compile()
    state_bytes = 64 * bytes_per_page(TINY, 4, 4) + 5 * TINY.vocab_size * 2
    assert compiled.memory_analysis().alias_size_in_bytes == state_bytes
    before = (runner._kv_cache, runner._counts)
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(before)]
    runner.dispatch(empty_batch(shape, 64 * 4)).wait(1)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    after = jax.tree.leaves((runner._kv_cache, runner._counts))
    assert [x.unsafe_buffer_pointer() for x in after] == places


def test_padding_writes_nothing() -> None:
    runner = tiny_runner(num_pages=8, page_size=4)
    for shape in SHAPES:
        runner.dispatch(empty_batch(shape, 8 * 4)).wait(1)
    for array in jax.tree.leaves(runner._kv_cache):
        assert not np.asarray(array).any()


def test_warm_up_compiles_everything_that_can_occur() -> None:
    runner = tiny_runner(num_pages=64, page_size=4)
    buckets = make_buckets(max_num_seqs=4, max_num_batched_tokens=32, max_pages=8)
    progress: list[tuple[int, int]] = []
    runner.warm_up(buckets.all, lambda done, total: progress.append((done, total)))
    assert progress[-1] == (len(buckets.all), len(buckets.all))
    count = runner.num_compiles
    for shape in buckets.all:
        runner.dispatch(empty_batch(shape, 64 * 4)).wait(1)
    assert runner.num_compiles == count == len(buckets.all)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_arguments_not_constants(shape: BatchShape) -> None:
    text = tiny_runner(num_pages=8, page_size=4).lower(shape).as_text()
    sizes = [
        np.prod([int(d) for d in dims.split("x") if d])
        for dims in re.findall(r"stablehlo.constant dense<[^>]{64,}> : tensor<((?:\d+x)+)", text)
    ]
    assert max(sizes, default=0) < TINY.hidden_size * TINY.hidden_size


def test_step_reads_no_device_value_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatching moves one packed array to the device and waits for nothing."""
    runner = tiny_runner(num_pages=8, page_size=4)
    batch = empty_batch(SHAPES[0], 32)
    runner.dispatch(batch).wait(1)
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        pending = runner.dispatch(batch)
    assert len(pending.wait(3).token_ids) == 3

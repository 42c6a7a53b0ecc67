"""The compiled step: packing, donation, no recompilation, no weight-sized constants."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from swiftjax.batch import BatchShape, empty_batch
from swiftjax.engine.buckets import make_buckets
from swiftjax.errors import InvalidRequestError
from swiftjax.memory import GIB, plan_pages
from swiftjax.model.assembly import allocate
from swiftjax.model.kv_cache import bytes_per_page
from swiftjax.model.packing import pack, packed_sizes, unpack, unpack_sampling
from swiftjax.model.programs import State
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
    assert tuple(map(len, packed)) == packed_sizes(shape)
    step = jax.jit(lambda words: unpack(words, shape))(packed.step)
    sampling = jax.jit(lambda words: unpack_sampling(words, shape.num_seqs))(packed.sampling)
    back = dataclasses.replace(step, sampling=sampling)
    sent = dataclasses.replace(batch, target_ids=None)
    for want, got in zip(jax.tree.leaves(sent), jax.tree.leaves(back), strict=True):
        assert want.dtype == got.dtype
        assert want.tobytes() == np.asarray(got).tobytes()


def test_fields_start_where_a_kernel_may_take_them_in_place() -> None:
    """At multiples of 256 bytes of the buffer, which is what Mosaic GPU asks of addresses."""
    batch = empty_batch(BatchShape(num_tokens=37, num_seqs=5, max_pages=9), 64)
    leaves, tree = jax.tree.flatten(batch)
    marked = [np.full_like(leaf, number) for number, leaf in enumerate(leaves, start=1)]
    packed = pack(jax.tree.unflatten(tree, marked))
    for words in packed:
        starts = np.flatnonzero((words != 0) & (words != np.roll(words, 1)))
        assert len(starts) > 5 and not (starts % 64).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_kv_cache_is_donated_and_aliased(shape: BatchShape) -> None:
    """The step's cache and last tokens are the caller's: same bytes in place, no copy."""
    runner = tiny_runner(num_pages=64, page_size=4)
    compiled = runner.lower(shape).compile()
    cache_bytes = 64 * bytes_per_page(TINY, 4)
    logits = jax.tree.leaves(runner._programs.abstract_logits(shape.num_seqs))
    donated = cache_bytes + sum(like.size * like.dtype.itemsize for like in logits)
    assert compiled.memory_analysis().alias_size_in_bytes == donated
    before = (runner._state.kv_cache, runner._state.last_tokens)
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(before)]
    runner.dispatch(empty_batch(shape, 64 * 4)).wait(1)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    after = jax.tree.leaves((runner._state.kv_cache, runner._state.last_tokens))
    assert [x.unsafe_buffer_pointer() for x in after] == places


def test_results_lie_where_those_of_the_last_such_step_lay() -> None:
    """So that a CUDA graph stays as it is; steps of other shapes come between."""
    runner = tiny_runner(num_pages=8, page_size=4)
    runner.warm_up(SHAPES)
    places: dict[int, set[tuple[int, ...]]] = {}
    for shape in (*SHAPES, *SHAPES, *reversed(SHAPES)):
        runner.dispatch(empty_batch(shape, 32)).wait(1)
        arrays = jax.tree.leaves(runner._old_logits[shape.num_seqs])
        found = tuple(x.unsafe_buffer_pointer() for x in arrays)
        places.setdefault(shape.num_seqs, set()).add(found)
    assert places and all(len(found) == 1 for found in places.values())


def test_token_counts_are_donated() -> None:
    runner = tiny_runner(num_pages=8, page_size=4)
    batch = empty_batch(SHAPES[0], 32)
    batch.sampling.presence_penalty[0] = 1.0
    before = runner._state.counts
    runner.dispatch(batch).wait(1)
    assert before.is_deleted() and not runner._state.counts.is_deleted()


def test_an_unread_token_is_taken_from_the_device() -> None:
    """Feeding the last step's token by its row equals feeding the token itself."""
    runner = tiny_runner(num_pages=8, page_size=4)

    def step(**fields: int) -> int:
        batch = empty_batch(SHAPES[0], 32)
        batch.context_lens[0], batch.sampling.token_rows[0] = fields.pop("context"), 3
        batch.slot_mapping[0] = batch.positions[0] = batch.context_lens[0] - 1
        for name, value in fields.items():
            getattr(batch, name)[0] = value
        return runner.dispatch(batch).wait(1).token_ids[0]

    first = step(context=1, token_ids=5)
    unread = step(context=2, token_sources=3)
    assert step(context=1, token_ids=5) == first
    assert step(context=2, token_ids=first) == unread
    assert step(context=2, token_ids=(first + 1) % TINY.vocab_size) != unread


def test_padding_writes_nothing() -> None:
    runner = tiny_runner(num_pages=8, page_size=4)
    for shape in SHAPES:
        runner.dispatch(empty_batch(shape, 8 * 4)).wait(1)
    for array in jax.tree.leaves(runner._state.kv_cache):
        assert not np.asarray(array).any()


def test_warm_up_compiles_everything_that_can_occur() -> None:
    runner = tiny_runner(num_pages=64, page_size=4)
    buckets = make_buckets(max_num_seqs=4, max_num_batched_tokens=32, max_pages=8)
    progress: list[tuple[int, int]] = []
    runner.warm_up(buckets.all, lambda done, total: progress.append((done, total)))
    count = runner.num_compiles
    assert progress[-1] == (count, count)
    for shape in buckets.all:
        for name in ("", "temperature", "top_k", "num_logprobs"):
            batch = empty_batch(shape, 64 * 4)
            for field in filter(None, ("temperature" if name == "top_k" else "", name)):
                getattr(batch.sampling, field)[0] = 1
            if shape.num_tokens > shape.num_seqs:
                batch.target_ids[0] = 1
            runner.dispatch(batch).wait(1)
    assert runner.num_compiles == count


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


def test_masks_are_found_while_the_forward_pass_runs() -> None:
    """They are asked for after it was started, and only by the sampler."""
    runner = tiny_runner(num_pages=8, page_size=4)
    shape, programs, seen = SHAPES[0], runner._programs, []
    forward, sampler = programs.forward, programs.sampler

    def masks() -> np.ndarray:
        seen.append("masks")
        words = np.zeros((shape.num_seqs, programs.num_mask_words), np.int32)
        words[:, 0] = 1 << 7
        return words

    def noted(name: str, program: Any) -> Any:
        return lambda *args: (seen.append(name), program(*args))[1]

    programs.forward = lambda shape: noted("forward", forward(shape))  # type: ignore
    programs.sampler = lambda *key: noted("sampler", sampler(*key))  # type: ignore
    sampled = runner.dispatch(empty_batch(shape, 32, masks=masks)).wait(shape.num_seqs)
    assert seen == ["forward", "masks", "sampler"]
    assert sampled.token_ids == [7] * shape.num_seqs


def test_a_cache_that_does_not_fit_any_more_tells_the_plan() -> None:
    """Another process may have taken memory since it was planned."""

    def fail(message: str) -> State:
        raise jax.errors.JaxRuntimeError(message)

    plan = plan_pages(
        budget=3 * GIB, weights=GIB, temporaries=0, page_bytes=2**20, page_size=16, max_pages=99,
        asked_pages=None,
    )  # fmt: skip
    with pytest.raises(InvalidRequestError, match="99 pages was planned") as told:
        allocate(partial(fail, "RESOURCE_EXHAUSTED: Out of memory"), plan)
    assert plan.table() in str(told.value)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        allocate(partial(fail, "INTERNAL: something else"), plan)

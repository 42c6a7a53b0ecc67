"""A KV cache in 8 bits: its size, its moves, and that engines answer as they do without it."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax import sizing
from swiftjax.batch import BatchShape, PageCopy, PageMove, PageMoves
from swiftjax.config import EngineConfig, KVCacheDtype
from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.streaming import MAX_STREAM_LEN
from swiftjax.errors import UnsupportedError
from swiftjax.kernels import QuantizedPages
from swiftjax.model.assembly import make_runner
from swiftjax.model.kv_cache import KVCache, bytes_per_page, make_kv_cache
from swiftjax.model.kv_swap import KVSwap
from swiftjax.model.runner import ModelRunner
from tests.model.test_same_answer import ALWAYS_SWAP, GREEDY, SEEDED, answers, assert_same
from tests.model.test_streaming_engine import CONFIGS, PROMPTS, prompt_of
from tests.tiny import TINY, tiny_core, tiny_params

KINDS: tuple[KVCacheDtype, ...] = ("int8", "fp8")
STORED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


@pytest.mark.parametrize(("kind", "size"), [("auto", 8 * 4), ("int8", 8 + 4), ("fp8", 8 + 4)])
def test_a_page_takes_what_is_planned_for_it(kind: KVCacheDtype, size: int) -> None:
    """A float32 head of 8 numbers takes 32 bytes, one in 8 bits 8 and its scale 4."""
    cache = make_kv_cache(
        TINY, num_pages=3, page_size=4, dtype=jnp.dtype("float32"), kv_cache_dtype=kind
    )
    assert bytes_per_page(TINY, 4, kind) == 2 * 2 * 2 * 4 * size
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == 3 * bytes_per_page(TINY, 4, kind)


def test_more_pages_fit() -> None:
    config = EngineConfig(model_path="llama3-8b", load_format="dummy", kv_cache_dtype="int8")
    planned = sizing.plan_engine(config)
    plain = bytes_per_page(planned.model, planned.sizes.page_size)
    assert plain / planned.memory.page_bytes == pytest.approx(256 / 132)
    assert planned.memory.num_pages > 1.9 * (sizing.CPU_CACHE_BYTES // plain)


def random_cache(kind: KVCacheDtype) -> KVCache:
    """Every value and scale drawn at random."""
    rng = np.random.default_rng(0)
    shape = (40, TINY.num_kv_heads, 4, TINY.head_dim)

    def pages() -> QuantizedPages:
        values = rng.integers(-100, 100, shape).astype(np.int8)
        scales = rng.standard_normal(shape[:3]).astype(np.float32)
        return QuantizedPages(jnp.asarray(values.view(STORED[kind])), jnp.asarray(scales))

    pools = [tuple(pages() for _ in range(TINY.num_layers)) for _ in "kv"]
    return KVCache(*pools)


def as_bytes(cache: KVCache) -> list[np.ndarray]:
    """All pools, a row of bytes per page."""
    return [np.array(x).reshape(40, -1).view(np.uint8) for x in jax.tree.leaves(cache)]


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_scales_move_together(kind: KVCacheDtype) -> None:
    """Out to the host and back to other pages, through a saved copy, and from page to page."""
    cache = random_cache(kind)
    before, swap = as_bytes(cache), KVSwap(cache)
    away = tuple(range(20))
    cache = swap.apply(cache, PageMoves(out=(PageMove("a", away),)))
    swap.load_copy("b", 20, swap.read_copy("a", 20))
    moves = PageMoves(
        back=(PageMove("b", tuple(range(20, 40))),), copies=(PageCopy(39, 0),), drop=("a", "b")
    )
    after = as_bytes(swap.apply(cache, moves))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[20:], old[:20])
        np.testing.assert_array_equal(new[0], old[19])
        np.testing.assert_array_equal(new[1:20], old[1:20])


def runner_of(kind: KVCacheDtype, *, num_pages: int, page_size: int = 16) -> ModelRunner:
    """The tiny model over a cache of this type."""
    return make_runner(
        TINY, tiny_params(), max_num_seqs=5, num_pages=num_pages, page_size=page_size,
        max_model_len=MAX_STREAM_LEN, implementation="xla", kv_cache_dtype=kind,
    )  # fmt: skip


def core_of(
    runner: ModelRunner,
    num_pages: int,
    *,
    page_size: int = 16,
    prefix_cache: bool = False,
    costs: PreemptionCosts | None = None,
    streams: bool = False,
) -> EngineCore:
    """A core of its own over a runner."""
    return tiny_core(
        num_pages=num_pages, page_size=page_size, max_model_len=100 if streams else 512,
        prefix_cache=prefix_cache, costs=costs, runner=runner, streams=streams,
    )  # fmt: skip


def test_engines_answer_alike_in_any_company() -> None:
    """Preempted and swapped, from a warm prefix cache, and with choices that share pages."""
    runner = runner_of("int8", num_pages=20)
    prompts = [prompt_of(37, 1), [*prompt_of(37, 1)[:33], 5, 6]]
    want = [answers(core_of(runner, 20), [p], configs=(GREEDY,))[0] for p in prompts]
    short = core_of(runner, 7, costs=ALWAYS_SWAP)
    assert_same(answers(short, prompts, preempt_every=3, configs=(GREEDY,)), want)
    assert short.scheduler.num_preemptions > 5
    cached = core_of(runner, 20, prefix_cache=True)
    for _ in range(2):
        assert_same(answers(cached, prompts, configs=(GREEDY,)), want)
    assert cached.scheduler.pool.num_idle > 0
    seeded = replace(SEEDED, max_new_tokens=10)
    alone = answers(core_of(runner, 20), prompts[:1], configs=(seeded,))
    assert_same(answers(core_of(runner, 20), [prompts[0]] * 2, configs=(seeded,)), alone * 2)


def test_streams_keep_their_answers() -> None:
    runner = runner_of("int8", num_pages=60, page_size=4)
    prompts, configs = PROMPTS[:2], [replace(c, max_new_tokens=25) for c in CONFIGS[:2]]
    want = [
        answers(core_of(runner, 60, page_size=4, streams=True), [prompt], configs=(config,))[0]
        for prompt, config in zip(prompts, configs, strict=True)
    ]
    core = core_of(runner, 30, page_size=4, streams=True, costs=ALWAYS_SWAP)
    assert_same(answers(core, prompts, preempt_every=7, configs=configs), want)


def test_saved_pages_are_told_apart_by_their_type() -> None:
    prints = {runner_of(kind, num_pages=2).fingerprint() for kind in ("auto", "int8", "fp8")}
    assert len(prints) == 3


def test_scales_are_donated_and_aliased_too() -> None:
    runner = runner_of("fp8", num_pages=64)
    compiled = runner.lower(BatchShape(num_tokens=4, num_seqs=4, max_pages=8)).compile()
    logits = jax.tree.leaves(runner._programs.abstract_logits(4))
    size = 64 * bytes_per_page(TINY, 16, "fp8")
    size += sum(like.size * like.dtype.itemsize for like in logits)
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes == size


def test_gpus_without_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(compute_capability="8.0", device_kind="NVIDIA A100")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [card])
    with pytest.raises(UnsupportedError, match=r"NVIDIA A100 has 8\.0: choose int8"):
        sizing.check_kv_cache_dtype("fp8")
    sizing.check_kv_cache_dtype("int8")
    card.compute_capability = "8.9"
    sizing.check_kv_cache_dtype("fp8")

"""The whole engine on a GPU: Triton kernels give the greedy tokens of the portable code."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.api import Engine
from swiftjax.build import build_core
from swiftjax.config import EngineConfig
from swiftjax.engine.request import GenerationConfig
from swiftjax.kernels import rope_write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs an NVIDIA GPU"),
]


def _tokens(shape: str, implementation: str) -> list[tuple[int, ...]]:
    config = EngineConfig(
        model_path=shape, load_format="dummy", dtype="float32", implementation=implementation,
        max_batch_size=8, max_num_batched_tokens=128, max_model_len=512, swap_space_gib=0.0,
        gpu_memory_utilization=0.5,
    )  # fmt: skip
    engine = Engine.from_core(build_core(config))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, length).tolist() for length in (1, 17, 64, 65, 130, 300)]
    answers = engine.generate(prompts, GenerationConfig(max_new_tokens=40, ignore_eos=True))
    del engine
    gc.collect()
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("shape", ["tiny", "smollm2-135m"])
def test_triton_gives_the_tokens_of_xla(shape: str) -> None:
    assert _tokens(shape, "triton") == _tokens(shape, "xla")


@pytest.mark.parametrize("num_tokens", [1, 8, 37, 300])
def test_rope_write_equals_its_reference(num_tokens: int) -> None:
    """Rotated queries, and pages with rotated keys, values and untouched other slots."""
    num_heads, num_kv_heads, width, pages, size = 8, 2, 64, 8, 64
    rng = np.random.default_rng(num_tokens)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    slots = rng.permutation(pages * size)[:num_tokens].astype(np.int32)
    slots[::5] = pages * size  # padding
    angle = rng.uniform(0, 6, (num_tokens, width // 2)).astype(np.float32)
    arrays = (
        normal(pages, num_kv_heads, size, width), normal(pages, num_kv_heads, size, width),
        normal(num_tokens, (num_heads + 2 * num_kv_heads) * width),
        jnp.cos(angle), jnp.sin(angle), jnp.asarray(slots),
    )  # fmt: skip
    got, want = (
        jax.jit(lambda *a, name=name: rope_write(*a, implementation=name))(*arrays)
        for name in ("triton", "xla")
    )
    for ours, theirs in zip(got, want, strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        # One rounding of bfloat16: the two compilers contract multiply and add differently.
        np.testing.assert_allclose(ours, theirs, rtol=2**-7, atol=2**-8)


def test_normed_heads_are_the_same_among_others() -> None:
    """In deterministic mode: the sums of their norms are added up in one order."""
    num_heads, num_kv_heads, width, most = 32, 8, 128, 2048
    rng = np.random.default_rng(0)
    qkv, q_norm, k_norm = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in ((most, (num_heads + 2 * num_kv_heads) * width), (width,), (width,))
    )
    angle = rng.uniform(0, 6, (most, width // 2)).astype(np.float32)
    cos, sin, slots = jnp.cos(angle), jnp.sin(angle), jnp.arange(most, dtype=jnp.int32)

    @jax.jit
    def run(*rows: jax.Array) -> tuple[jax.Array, ...]:
        pages = jnp.zeros((most // 64, num_kv_heads, 64, width), jnp.bfloat16)
        return rope_write(
            pages, pages, *rows, q_norm=q_norm, k_norm=k_norm, eps=1e-6,
            implementation="invariant",
        )  # fmt: skip

    q, keys, _ = run(qkv, cos, sin, slots)
    for count in (1, 8, 32, 128):
        few_q, few_keys, _ = run(*(x[:count] for x in (qkv, cos, sin, slots)))
        np.testing.assert_array_equal(few_q, q[:count])
        here = min(count, 64)
        np.testing.assert_array_equal(few_keys[0, :, :here], keys[0, :, :here])

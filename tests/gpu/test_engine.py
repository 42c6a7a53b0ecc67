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

"""A model with products in 8 bits: rows rounded by the kernel, interpreted, and in plain jnp."""

from dataclasses import replace

import numpy as np
import pytest

from swiftjax.converters.quantize import with_quantization
from swiftjax.quantization import Quantization, QuantType
from tests.forward import forward_logits
from tests.tiny import TINY, tiny_params

MODEL = replace(TINY, head_dim=16, num_heads=2, num_kv_heads=1, num_layers=1, dtype="bfloat16")
TOKENS = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("kind", ["fp8", "w8a8"])
def test_logits_are_alike(kind: QuantType) -> None:
    """Token by token; products are the portable ones in one and kernels in the other."""
    model = with_quantization(MODEL, Quantization(kind=kind))
    params = tiny_params(model)
    plain, ours = (
        forward_logits(model, params, TOKENS, chunks=[1] * 5, implementation=name)
        for name in ("xla", "triton")
    )
    assert np.linalg.norm(ours - plain) < 0.05 * np.linalg.norm(plain)
    assert np.array_equal(
        ours, forward_logits(model, params, TOKENS, chunks=[1] * 5, implementation="triton")
    )

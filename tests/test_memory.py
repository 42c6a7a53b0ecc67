"""What a step takes beside weights and cache, against what XLA asks for when it compiles one."""

from dataclasses import replace

import pytest

from swiftjax.converters.quantize import with_quantization
from swiftjax.memory import GIB, temporaries
from swiftjax.quantization import Quantization, QuantType
from swiftjax.shapes import SHAPES

# Compiled for an H200 by jax 0.11.2 (`memory_analysis`, GiB): while the forward pass runs, and what
# outlives it, hidden rows and logits twice.
COMPILED: list[tuple[str, QuantType | None, int, int, float]] = [
    ("llama3-8b", None, 8192, 256, 0.660 + 0.185),
    ("llama3-8b", "int8", 8192, 256, 0.783 + 0.185),
    ("llama3-8b", "int4", 8192, 256, 0.723 + 0.185),
    ("llama3-8b", "fp8", 8192, 256, 0.609 + 0.185),
    ("llama3-8b", "w8a8", 8192, 256, 1.375 + 0.185),
    ("llama3-8b", "int4", 512, 256, 0.127 + 0.126),
    ("llama3-1b", None, 8192, 256, 0.377 + 0.154),
    ("llama3-1b", "fp8", 8192, 256, 0.315 + 0.154),
    ("llama3-70b", "int4", 8192, 64, 1.879 + 0.156),
    ("llama3-70b", "int4", 2048, 64, 1.126 + 0.062),
    # So many tokens to a row that the samplers are not what counts; int4 and fp8 on an A100, where
    # they take most.
    ("llama3-8b", None, 16384, 64, 1.320 + 0.156),
    ("llama3-8b", "int4", 16384, 64, 1.942 + 0.156),
    ("llama3-8b", "fp8", 16384, 64, 2.692 + 0.156),
    ("llama3-8b", "w8a8", 16384, 64, 2.750 + 0.156),
]


@pytest.mark.parametrize(("shape", "kind", "num_tokens", "num_rows", "compiled"), COMPILED)
def test_what_is_planned_holds_a_compiled_step(
    shape: str, kind: QuantType | None, num_tokens: int, num_rows: int, compiled: float
) -> None:
    model = SHAPES[shape]
    if kind is not None:
        model = with_quantization(model, Quantization(kind=kind))
    planned = temporaries(model, num_tokens=num_tokens, num_rows=num_rows, itemsize=2) / GIB
    samplers = 25 * num_rows * model.vocab_size / GIB
    assert max(compiled, samplers) <= planned <= max(compiled, samplers) + 1.5


def test_a_head_of_few_bits_is_written_out_too() -> None:
    """8B shapes: 128,256 words of 4,096 numbers, for prompts that are scored."""
    kept = with_quantization(SHAPES["llama3-8b"], Quantization(kind="int4"))
    whole = with_quantization(SHAPES["llama3-8b"], Quantization(kind="int4", keep=()))
    assert kept.weight_format("head") is None and whole.weight_format("head") is not None
    sizes = {"num_tokens": 2048, "num_rows": 128, "itemsize": 2}
    assert temporaries(whole, **sizes) >= 1.04 * GIB > temporaries(kept, **sizes)
    plain = replace(whole, quantization=None)
    assert temporaries(plain, **sizes) < 1.04 * GIB

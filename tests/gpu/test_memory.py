"""The plan of the memory against what the compiler asks for, at the shapes of a large model."""

from dataclasses import replace

import jax
import pytest

from swiftjax.batch import BatchShape
from swiftjax.converters.quantize import with_quantization
from swiftjax.memory import GIB, temporaries
from swiftjax.model.assembly import make_programs
from swiftjax.quantization import Quantization, QuantType
from swiftjax.shapes import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs an NVIDIA GPU"),
]

TOKENS, ROWS = 8192, 256


def asked_for(program: jax.stages.Compiled) -> tuple[int, int]:
    """Bytes while it runs, and bytes of results that are no donated arguments."""
    analysis = program.memory_analysis()
    assert analysis is not None
    kept = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes, kept


@pytest.mark.parametrize("kind", [None, "int4", "fp8"])
def test_the_largest_step_takes_what_was_planned(kind: QuantType | None) -> None:
    # Programs take turns at the same temporary memory, so three layers take what 32 do.
    model = replace(SHAPES["llama3-8b"], num_layers=3)
    if kind:
        model = with_quantization(model, Quantization(kind=kind))
    programs = make_programs(
        model, max_num_seqs=ROWS, num_pages=2000, page_size=64, max_model_len=9216,
        implementation="mosaic",
    )  # fmt: skip
    shape = BatchShape(num_tokens=TOKENS, num_seqs=ROWS, max_pages=144, long_chunks=True)
    forward, kept = asked_for(programs.forward(shape))
    sampler, _ = asked_for(programs.sampler(ROWS, "full"))
    planned = temporaries(model, num_tokens=TOKENS, num_rows=ROWS, itemsize=2)
    assert max(forward, sampler) + kept <= planned <= max(forward, sampler) + kept + 1.5 * GIB

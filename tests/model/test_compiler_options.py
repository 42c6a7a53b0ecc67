"""Options of the compiler: for whom, and only where the installed XLA knows them."""

import dataclasses

import pytest

from swiftjax.batch import BatchShape
from swiftjax.model import compiler_options
from swiftjax.model.compiler_options import (
    FEW_KERNELS,
    LIBRARY_PRODUCTS,
    are_known,
    forward_options,
)

WIDE = BatchShape(num_tokens=64, num_seqs=64, max_pages=4)


def test_unknown_options_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert are_known((("xla_cpu_enable_fast_math", False),))
    assert not are_known((("xla_gpu_no_such_option", True),))
    monkeypatch.setattr(compiler_options, "are_known", lambda options: False)
    assert forward_options(WIDE, "9.0") == {}


def test_this_xla_knows_them() -> None:
    assert forward_options(WIDE, "9.0") == dict(FEW_KERNELS)
    long = dataclasses.replace(WIDE, num_tokens=512)
    assert forward_options(long, "9.0") == dict(LIBRARY_PRODUCTS)
    assert forward_options(long, "9.0", quant_type="int8") == {}
    mixed = dataclasses.replace(WIDE, num_tokens=80)
    assert forward_options(mixed, "9.0") == {}
    assert forward_options(mixed, "9.0", quant_type="fp8") == dict(LIBRARY_PRODUCTS)


@pytest.mark.parametrize(
    ("shape", "capability"),
    [
        (WIDE, None),  # a CPU
        (WIDE, "8.0"),
        (dataclasses.replace(WIDE, num_tokens=32, num_seqs=32), "9.0"),
        (dataclasses.replace(WIDE, num_tokens=511), "9.0"),
    ],
)
def test_none_for_other_programs(shape: BatchShape, capability: str | None) -> None:
    assert forward_options(shape, capability) == {}

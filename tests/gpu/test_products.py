"""Products with quantised weights on a real GPU, and the rounding of rows in front of them."""

import jax
import numpy as np
import pytest

from swiftjax.kernels import _triton, split_k
from tests.kernels.test_quantized_matmul import MATMULS, check_product
from tests.kernels.test_rounded_rows import SOURCES, UNITS, check_rounded, make_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs an NVIDIA GPU"),
]


@pytest.mark.skipif(not _triton.has_fp8(), reason="needs a GPU with fp8")
@pytest.mark.parametrize("width", [1, 577, 4096, 14336, 28672])
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("source", SOURCES)
def test_rows_are_rounded_to_the_nearest_codes(source: str, dtype: str, width: int) -> None:
    rows = make_rows(source, width, dtype, num_rows=64)
    found, again = check_rounded(rows), check_rounded(rows)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("num_tokens", [1, 16, 37, 64])
@pytest.mark.parametrize("kind", ["int4", *MATMULS])
def test_products_of_few_tokens(kind: str, num_tokens: int) -> None:
    check_product(kind, num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 16, 37, 64])
def test_products_by_hoppers_own(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_k, "FP8_AS_SUCH", True)
    check_product("fp8", num_tokens)

"""Attention of whole prompts by cuDNN: its portable twin, its refusals, its lowering for CUDA."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from swiftjax.kernels import _triton, ragged_attention
from swiftjax.kernels.implementation import Implementation
from tests.kernels.attention_case import AttentionCase, Shape, make_case, relative_error
from tests.kernels.cuda_cases import MODELS, Case, ragged_case
from tests.kernels.shapes import PROMPTS
from tests.kernels.test_cuda_lowering import cross_lower
from tests.kernels.test_quantized_pages import quantized_case

SMALL = Shape(sequences=((0, 20),), head_dim=64, dtype="bfloat16")


def attend(case: AttentionCase, implementation: Implementation, **options: object) -> jax.Array:
    """Whole-prompt attention of a case."""
    run = partial(
        ragged_attention, **{**case.options, **options}, whole_prompt=True,
        implementation=implementation,
    )  # fmt: skip
    arrays = (case.q, case.k_pages, case.v_pages, case.page_table, case.query_starts)
    return jax.jit(run)(*arrays, case.context_lens)


@pytest.mark.parametrize("name", PROMPTS)
def test_twin_equals_dense(name: str) -> None:
    case = make_case(PROMPTS[name])
    out = attend(case, "triton")
    assert relative_error(out, case.expected) <= 1e-2
    assert relative_error(out, np.asarray(attend(case, "reference"), np.float64)) <= 1e-2
    count = int(case.query_starts[-1])
    assert not np.asarray(out[count:], np.float32).any()


def test_what_cudnn_lacks_is_refused_by_name() -> None:
    case = make_case(SMALL)
    with pytest.raises(
        NotImplementedError, match=r"lacks a window of 7 tokens; leave it to the pa"
    ):
        attend(case, "triton", window=7)
    for shape, words in (
        (replace(SMALL, dtype="float32"), "dtype float32"),
        (replace(SMALL, head_dim=256), "head_dim 256"),
        (replace(SMALL, streams=((4, 8),)), "windows and sinks"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            attend(make_case(shape), "triton")
    with pytest.raises(NotImplementedError, match="pages in 8 bits"):
        attend(quantized_case(case, "int8")[0], "triton")


def test_lowers_to_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "is_interpreted", lambda: False)
    # jax asks for the library while it traces; here there is none.
    name = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(name, lambda: 91000)
    case = ragged_case(MODELS["llama3-8b"], num_tokens=512, num_seqs=1)

    def run(*arrays: jax.Array) -> jax.Array:
        return ragged_attention(*arrays, scale=0.1, whole_prompt=True, implementation="triton")

    text = cross_lower(Case(run, case.specs))
    assert "__cudnn$fmhaSoftmax" in text and "PADDING_CAUSAL" in text
    assert "__gpu$xla.gpu.triton" not in text

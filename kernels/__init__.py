"""Paged attention and KV writes: the ops that the model calls, each with several implementations.

`reference.py` says what every op means; read it first. Nothing here knows the rest of SwiftJAX, so
the folder can be used alone. The model calls the ops; `choose_implementation` is called once,
where the engine is built.
"""

from swiftjax.kernels import packed_int4
from swiftjax.kernels._triton import has_fp8
from swiftjax.kernels.decode_attention import decode_attention
from swiftjax.kernels.implementation import (
    IMPLEMENTATIONS,
    Implementation,
    check_supported,
    choose_implementation,
)
from swiftjax.kernels.matmul import FILLED_ROWS, gated_matmul, knows_invariant, matmul
from swiftjax.kernels.prompt_attention import check_prompt_attention
from swiftjax.kernels.quantized_matmul import (
    fp8_gated,
    fp8_matmul,
    int4_matmul,
    int8_matmul,
    w8a8_matmul,
)
from swiftjax.kernels.quantized_pages import Pages, QuantizedPages
from swiftjax.kernels.ragged_attention import ragged_attention
from swiftjax.kernels.reference import rms_norm, rotate
from swiftjax.kernels.rope_write import rope_write
from swiftjax.kernels.rounded_rows import Gated, Normed, Rows, plain_rows
from swiftjax.kernels.streams import Streams
from swiftjax.kernels.write_kv import write_kv

__all__ = [
    "FILLED_ROWS",
    "IMPLEMENTATIONS",
    "Gated",
    "Implementation",
    "Normed",
    "Pages",
    "QuantizedPages",
    "Rows",
    "Streams",
    "check_prompt_attention",
    "check_supported",
    "choose_implementation",
    "decode_attention",
    "fp8_gated",
    "fp8_matmul",
    "gated_matmul",
    "has_fp8",
    "int4_matmul",
    "int8_matmul",
    "knows_invariant",
    "matmul",
    "packed_int4",
    "plain_rows",
    "ragged_attention",
    "rms_norm",
    "rope_write",
    "rotate",
    "w8a8_matmul",
    "write_kv",
]

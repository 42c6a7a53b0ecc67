"""Round weights to the nearest value of a format, on the host.

Every function takes [outputs, inputs] in float32 and gives the arrays that the matrix products of
`kernels/quantized_reference.py` read. Called by `quantize.py`, block by block of outputs.
"""

import ml_dtypes
import numpy as np
from jaxtyping import Float32, UInt8

from swiftjax.kernels import packed_int4
from swiftjax.quantization import WeightFormat

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0
INT8_MAX = 127.0
INT4_MAX = 15.0
# The smallest normal float32: a GPU flushes a smaller scale to zero.
SMALLEST_SCALE = np.float32(2.0**-126)


def round_to_nearest(
    weights: Float32[np.ndarray, "N K"], form: WeightFormat, symmetric: bool = False
) -> dict[str, np.ndarray]:
    """Quantise a matrix; keys are the suffixes of the parameters' names: kernel, kernel_scale.

    `symmetric` puts the zero point of int4 in the middle; 8 bits know nothing else.
    """
    if form.kind == "int4":
        codes, scale, zero = int4_codes(weights, form.group_size, symmetric)
        return {"kernel": packed_int4.pack(codes), "kernel_scale": scale, "kernel_zero": zero}
    largest = FP8_MAX if form.kind == "fp8" else INT8_MAX
    scale = np.maximum(np.abs(weights).max(axis=1) / np.float32(largest), SMALLEST_SCALE)
    values = np.clip(weights / scale[:, None], -largest, largest)
    kernel = values.astype(FP8) if form.kind == "fp8" else np.rint(values).astype(np.int8)
    return {"kernel": kernel, "kernel_scale": scale}


def int4_codes(
    weights: Float32[np.ndarray, "N K"], group_size: int, symmetric: bool = False
) -> tuple[UInt8[np.ndarray, "N K"], Float32[np.ndarray, "G N"], UInt8[np.ndarray, "G N"]]:
    """Codes, scales and zero points per group of inputs; the last group may be short."""
    num_outputs, num_inputs = weights.shape
    num_groups = -(-num_inputs // group_size)
    # Zeros as padding change no group's range, which contains zero in any case.
    padded = np.zeros((num_outputs, num_groups * group_size), np.float32)
    padded[:, :num_inputs] = weights
    groups = padded.reshape(num_outputs, num_groups, group_size)
    low = np.minimum(groups.min(axis=2), 0)
    high = np.maximum(groups.max(axis=2), 0)
    if symmetric:  # codes 1 to 15 around 8
        scale = np.maximum(np.maximum(-low, high) / np.float32(7), SMALLEST_SCALE)
        zero = np.full_like(scale, 8)
    else:
        # Halved first: the difference of two large numbers must not become infinite.
        scale = np.maximum((high / 2 - low / 2) / np.float32(INT4_MAX / 2), SMALLEST_SCALE)
        zero = np.clip(np.rint(-low / scale), 0, INT4_MAX)
    codes = np.clip(np.rint(groups / scale[:, :, None]) + zero[:, :, None], 0, INT4_MAX)
    codes = codes.astype(np.uint8).reshape(num_outputs, -1)[:, :num_inputs]
    return codes, np.ascontiguousarray(scale.T), np.ascontiguousarray(zero.astype(np.uint8).T)

"""What XLA is told beside its defaults for programs that are faster so, where it knows the words.

Called by `programs.py`. The measurements are in benchmarks/NOTES.md.
"""

import functools

import jax
import jax.numpy as jnp

from swiftjax.batch import BatchShape
from swiftjax.quantization import QuantType

Options = tuple[tuple[str, bool | str], ...]

# Products in one pass over their weights, with what follows them in the same kernel. With fewer
# rows than this they leave half of an H200 idle; other GPUs have not been measured.
FEW_KERNELS: Options = (
    ("xla_gpu_experimental_gemm_fusion_v2", True),
    ("xla_gpu_experimental_force_split_k", "1"),
)
MIN_ROWS = 64
# Large products are cuBLAS's in the end; trying Triton's took a quarter of the time to compile, and
# in 8 bits, where our kernels leave off at 64 tokens, most of it. Not so where weights alone have 8
# bits: without Triton XLA would widen them in memory first. (Those of 4 bits we write out.)
LIBRARY_PRODUCTS: Options = (("xla_gpu_enable_triton_gemm", False),)
MIN_TOKENS: dict[QuantType | None, int] = {None: 512, "int4": 512, "fp8": 65, "w8a8": 65}
CAPABILITY = "9.0"


def forward_options(
    shape: BatchShape, capability: str | None = None, *, quant_type: QuantType | None = None
) -> dict[str, bool | str]:
    """For the forward pass of a batch of this shape, on such a GPU or the default device.

    `quant_type` is that of the weights.
    """
    if capability is None:
        capability = getattr(jax.devices()[0], "compute_capability", "")
    if capability != CAPABILITY:
        return {}
    chosen: Options = ()
    if shape.num_tokens == shape.num_seqs >= MIN_ROWS:
        chosen = FEW_KERNELS
    elif shape.num_tokens >= MIN_TOKENS.get(quant_type, shape.num_tokens + 1):
        chosen = LIBRARY_PRODUCTS
    return dict(chosen) if are_known(chosen) else {}


@functools.cache
def are_known(options: Options) -> bool:
    """Whether the installed XLA takes these options: their names are of one version and another."""
    try:
        jax.jit(lambda: jnp.zeros(())).lower().compile(dict(options))
    except jax.errors.JaxRuntimeError:
        return False
    return True

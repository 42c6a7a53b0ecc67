"""The seam to Pallas on Triton: the only file that imports `pallas.triton`.

That backend is deprecated upstream since jax 0.11.0, so a move to another one should touch this
file and the kernels' loads and stores, nothing else. On a CPU every kernel runs in interpret mode.
Knows nothing about attention.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Upstream repeats its deprecation notice at every lowering; the plan for it is in this docstring.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)

load = plt.load
store = plt.store

Capability = tuple[int, int]  # CUDA compute capability

# Shared memory that one program may use, in bytes.
SHARED_MEMORY: Mapping[Capability, int] = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
}
SMALLEST_SHARED_MEMORY = 99 * 1024
# From Ada and Hopper on there are instructions that make numbers of e4m3, and of them.
FP8_CAPABILITY: Capability = (8, 9)
# The one architecture whose tensor cores and copies are told what to do in this form (sm_90a).
HOPPER: Capability = (9, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a kernel is launched: the two knobs that Triton has."""

    num_warps: int
    num_stages: int


def is_interpreted() -> bool:
    """Whether kernels run in the interpreter: there is no GPU to compile for."""
    return jax.default_backend() == "cpu"


def capability() -> Capability:
    """What the default device can do; an interpreted kernel is held to what an H200 can."""
    if is_interpreted():
        return HOPPER
    major, minor = str(getattr(jax.devices()[0], "compute_capability", "0.0")).split(".")
    return int(major), int(minor)


def shared_memory_limit() -> int:
    """Bytes of shared memory that a program may use on the default device."""
    return SHARED_MEMORY.get(capability(), SMALLEST_SHARED_MEMORY)


def has_fp8() -> bool:
    """Whether the default device converts e4m3 numbers; Triton ends the process where not."""
    return capability() >= FP8_CAPABILITY


class TileSize(NamedTuple):
    """Query rows and keys of a tile, and how many trips' keys and values are in flight."""

    rows: int  # a query that is rotated twice counts twice
    block_k: int
    num_stages: int


def shared_memory(size: TileSize, width: int, itemsize: int) -> int:
    """Bound the bytes of shared memory of an attention program with `width` wide heads.

    Right for sm_90 and 16-bit queries of 64 rows or more; everything else takes less.
    """
    return (size.rows + 2 * size.num_stages * size.block_k) * width * itemsize


def fit_shared_memory(
    size: TileSize, *, width: int, itemsize: int, min_rows: int, rotations: int = 1
) -> TileSize:
    """Shrink a tile until its estimate is within the device's limit.

    With `rotations` 2 every query row of the tile is there once more, for the sinks. Raises
    NotImplementedError if the smallest tile is still too large.
    """
    limit = shared_memory_limit()
    rows, block_k, num_stages = size
    while shared_memory(TileSize(rotations * rows, block_k, num_stages), width, itemsize) > limit:
        if num_stages > 2:
            num_stages -= 1
        elif block_k > 16:
            block_k //= 2
        elif rows > max(16, min_rows):
            rows //= 2
        else:
            raise NotImplementedError(
                f"{rotations * rows} query rows of width {width} with {itemsize} bytes each do "
                f"not fit into {limit} bytes of shared memory; use implementation='xla'"
            )
    return TileSize(rows, block_k, num_stages)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n: Triton has no other tile sizes."""
    return 1 << max(0, n - 1).bit_length()


def exp2(x: jax.Array) -> jax.Array:
    """Two to the power of x by the hardware's instruction, float32; tiny results become 0.

    `jnp.exp2` lowers to a library call that also keeps denormals: four instructions more each.
    """
    return jnp.exp2(x) if is_interpreted() else _instruction("ex2.approx.ftz.f32", x)


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x by the hardware's instruction, float32, off by a last bit at most; 0 for infinity.

    A division takes eight instructions.
    """
    return 1 / x if is_interpreted() else _instruction("rcp.approx.ftz.f32", x)


def round_even(x: jax.Array) -> jax.Array:
    """Round float32 to whole numbers, ties to even ones: `jnp.round`, which does not lower."""
    return jnp.round(x) if is_interpreted() else _instruction("cvt.rni.f32.f32", x)


def multiply_add(a: jax.Array, b: jax.Array | float, c: jax.Array) -> jax.Array:
    """a * b + c in one instruction, float32, all broadcast to the shape of `a`.

    XLA's Triton keeps a product and a sum apart, unlike Triton's own compiler: two instructions.
    """
    if is_interpreted():
        return a * b + c
    factors = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), a.shape) for x in (b, c))
    return _instruction("fma.rn.f32", a, *factors)


def _instruction(name: str, *args: jax.Array) -> jax.Array:
    """One PTX instruction from float32 to float32."""
    operands = ", ".join(f"${i}" for i in range(len(args) + 1))
    (out,) = plt.elementwise_inline_asm(
        f"{name} {operands};",
        args=args,
        constraints=",".join(["=f", *("f" for _ in args)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return out


def unpack_nibble(words: jax.Array, zeros: jax.Array, j: int) -> jax.Array:
    """Nibble `j` of every word minus `zeros`, in the 16-bit float type of `zeros`.

    Two words at a time: a nibble becomes the last bits of the mantissa of a number whose last bit
    counts one (128 in bfloat16, 1024 in float16), and that number is subtracted with the zero
    point. Three instructions make two weights, where conversions would take twice as many; what
    all planes of a word have in common the assembler computes once.
    """
    name, one, base = (
        ("bf16x2", 0x3F80, 0x4300) if zeros.dtype == jnp.bfloat16 else ("f16x2", 0x3C00, 0x6400)
    )
    one, base, sign = (f"0x{half * 0x10001:08x}" for half in (one, base, 0x8000))
    lines = [
        ".reg .b32 pair, base, one, minus;",
        f"mov.b32 base, {base};",
        f"mov.b32 one, {one};",
        f"fma.rn.{name} minus, $3, one, base;",
        f"xor.b32 minus, minus, {sign};",
        f"prmt.b32 pair, $1, $2, {'0x5410' if j < 4 else '0x7632'};",
        f"shr.u32 pair, pair, {4 * (j % 4)};",
        "lop3.b32 pair, pair, 0x000f000f, base, 0xea;",
        f"fma.rn.{name} $0, pair, one, minus;",
    ]
    (out,) = plt.elementwise_inline_asm(
        "{" + " ".join(lines) + "}",
        args=[words, zeros],
        constraints="=r,r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, zeros.dtype)],
    )
    return out


def launch(
    kernel: Callable[..., None],
    arguments: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: tuple[int, ...],
    knobs: Launch,
    aliases: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Run `kernel(*argument_refs, *output_refs)` once per grid point; all refs are whole arrays.

    The first grid axis varies fastest. `aliases` maps arguments to outputs that share their memory.
    """
    if math.prod(grid) == 0:
        raise ValueError(f"kernel {name} has an empty grid {grid}")
    whole = pl.BlockSpec(memory_space=pl.ANY)
    call: Any = pl.pallas_call(
        kernel,
        out_shape=list(outputs),
        grid=grid,
        in_specs=[whole] * len(arguments),
        out_specs=[whole] * len(outputs),
        input_output_aliases=dict(aliases or {}),
        compiler_params=plt.CompilerParams(num_warps=knobs.num_warps, num_stages=knobs.num_stages),
        interpret=is_interpreted(),
        name=name,
    )
    return tuple(call(*arguments))

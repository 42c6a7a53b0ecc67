"""What Pallas cannot say of a warpgroup's registers, said in MLIR: the other half of `_mosaic.py`.

Matrices here are laid out as products are (`_mosaic.matrix`): of 16 bits two neighbours of a row
share a register, of 32 bits they are two. In the simulation the same is computed plainly.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from swiftjax.kernels import _triton


def nibbles(x: jax.Array, bit: int, exponents: jax.Array, dtype: Any) -> jax.Array:
    """Put 4 bits of each word of a matrix under the exponent of a float of 16 bits.

    `exponents` is a scalar, int32, with that exponent in both halves. Two neighbours share a
    register, so they are masked together.
    """
    if _triton.is_interpreted():
        kept = lax.shift_right_logical(x, jnp.int32(bit)) & jnp.int32(15)
        whole = (kept | (exponents & jnp.int32(0xFFFF))).astype(jnp.uint16)
        return lax.bitcast_convert_type(whole, dtype)
    layout = plgpu.Layout.WGMMA
    out = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=layout)

    def masked(_: Any, whole: Any, exponent: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        float_type = ir.BF16Type if dtype == jnp.bfloat16 else ir.F16Type
        halves = ir.VectorType.get((2,), float_type.get())

        def pair(words: Any) -> Any:
            low, high = (vector.extract(words, [], [i]) for i in range(2))
            chosen = arith.constant(i32, 0x5410 if bit < 16 else 0x7632)
            both: Any = llvm.inline_asm(
                i32, [low, high, chosen], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"
            )
            shifted = arith.shrui(both, arith.constant(i32, bit % 16))
            kept = arith.andi(shifted, arith.constant(i32, 0x000F000F))
            number = arith.ori(kept, exponent.registers.item())
            return vector.bitcast(halves, vector.broadcast(ir.VectorType.get((1,), i32), number))

        registers = np.empty_like(whole.registers)
        for index, words in np.ndenumerate(whole.registers):
            registers[index] = pair(words)
        return type(whole)(_registers=registers, _layout=whole.layout, _is_signed=None)

    inlined: Any = plgpu.inline_mgpu(arg_types=(layout, plgpu.Layout.WG_SPLAT(())), return_type=out)
    return inlined(masked)(x, exponents)


def join(parts: Sequence[jax.Array]) -> jax.Array:
    """Put matrices in registers side by side."""
    if _triton.is_interpreted():
        return jnp.concatenate(parts, axis=1)
    rows, columns = parts[0].shape
    whole = plgpu.ShapeDtypeStruct(
        (rows, columns * len(parts)), parts[0].dtype, layout=plgpu.Layout.WGMMA
    )

    def side_by_side(_: Any, *pieces: Any) -> Any:
        registers = np.concatenate([piece.registers for piece in pieces], axis=1)
        return type(pieces[0])(
            _registers=registers, _layout=pieces[0].layout, _is_signed=pieces[0].is_signed
        )

    inlined: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,) * len(parts), return_type=whole
    )
    return inlined(side_by_side)(*parts)

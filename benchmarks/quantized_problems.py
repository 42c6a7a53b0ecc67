"""Products with quantised weights to be timed: random weights, forms of the product, tiles to try.

Knows no clock. Used by `quantized_matmul.py`, which times and reports.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from swiftjax import kernels
from swiftjax.kernels import _triton
from swiftjax.kernels import quantized_reference as reference
from swiftjax.kernels.hopper_matmul import hopper_int4
from swiftjax.kernels.hopper_work import HopperTile, possible_tiles
from swiftjax.kernels.int4_matmul import choose_int4_tile, int4_tiles
from swiftjax.kernels.narrow_matmul import narrow_matmul
from swiftjax.kernels.quantized_matmul import MOST_TOKENS
from swiftjax.kernels.split_k import MatmulTile
from swiftjax.kernels.split_k import choose_tile as choose_triton_tile
from swiftjax.model.linear import packed_params
from swiftjax.quantization import WeightFormat

KINDS = ("int4", "int8", "fp8", "w8a8")
COMPARED_KINDS = ("bf16", "int4", "int8")
GROUP_SIZE = 128
ROTATED_BYTES = 1.2e9
TOLERANCE, CHECKED_OUTPUTS = 2e-2, 256
MOSAIC_TILES = 6
AS_CALLED = "as the model calls it"

Matmul = Callable[..., jax.Array]
Forms = dict[str, Matmul]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Weights of one kind and shape, several times over."""

    kind: str
    inputs: int
    outputs: int
    weights: list[tuple[jax.Array, ...]]

    @property
    def packed_bytes(self) -> int:
        """Of the codes of one matrix, without scales."""
        return self.weights[0][0].nbytes


def make_problem(kind: str, inputs: int, outputs: int) -> Problem:
    """Random codes; a scale that gives results of about one."""
    if kind == "bf16":
        likes: list[Any] = [jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16)]
    else:
        form = WeightFormat(kind=kind, group_size=GROUP_SIZE if kind == "int4" else 0)  # type: ignore[arg-type]
        likes = list(packed_params(form, inputs, outputs).values())
    size = likes[0].size * likes[0].dtype.itemsize
    weights = []
    for i in range(-(-int(ROTATED_BYTES) // size)):
        keys = jax.random.split(jax.random.key(i), len(likes))
        weights.append(tuple(map(random_like, keys, likes)))
    return Problem(kind=kind, inputs=inputs, outputs=outputs, weights=weights)


@partial(jax.jit, static_argnums=1)
def random_like(key: jax.Array, like: Any) -> jax.Array:
    """Any codes of one parameter."""
    if like.dtype == jnp.int32:
        return jax.random.bits(key, like.shape, jnp.uint32).view(jnp.int32)
    if like.dtype == jnp.int8:
        return jax.random.randint(key, like.shape, -127, 128, jnp.int8)
    if like.dtype == jnp.uint8:
        return jax.random.randint(key, like.shape, 0, 16, jnp.uint8)
    if like.dtype == jnp.float32:
        return jax.random.uniform(key, like.shape, jnp.float32, 0.01, 0.02)
    return jax.random.normal(key, like.shape, jnp.bfloat16).astype(like.dtype)


def rows_of(problem: Problem, tokens: int) -> jax.Array:
    """The activations, the same each time."""
    return jax.random.normal(jax.random.key(7), (tokens, problem.inputs), jnp.bfloat16)


def check(problem: Problem, x: jax.Array, out: jax.Array) -> None:
    """Compare some outputs with the plain computation; raises AssertionError."""
    if problem.kind == "bf16":
        return
    kernel, *scales = problem.weights[0]
    plain = getattr(reference, f"{problem.kind}_matmul")
    options = {"group_size": GROUP_SIZE} if problem.kind == "int4" else {}
    some = slice(None, None, problem.outputs // CHECKED_OUTPUTS)
    wanted = plain(x, kernel[some], *(scale[..., some] for scale in scales), **options)
    got, wanted = (part.astype(jnp.float32) for part in (out[:, some], wanted))
    error = float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))
    assert error < TOLERANCE, f"relative error {error:.1e}"


def called(kind: str) -> Matmul:
    """The op that the model calls."""
    if kind == "bf16":
        return jnp.dot
    options = {"group_size": GROUP_SIZE} if kind == "int4" else {}
    return partial(getattr(kernels, f"{kind}_matmul"), **options)


def apart(x: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """int8 weights are written out in bfloat16 first, and then XLA's product of them."""
    weights = kernel.astype(jnp.float32) * scale[:, None]
    weights = lax.optimization_barrier(weights.astype(x.dtype))
    product: jax.Array = lax.dot_general(x, weights, reference.CONTRACT_LAST)
    return product


def compared_forms(problem: Problem, tokens: int) -> Forms:
    """The present form and those that may replace it."""
    forms = {AS_CALLED: called(problem.kind)}
    if problem.kind == "int8" and tokens > MOST_TOKENS:
        forms["weights written out apart"] = apart
    if problem.kind != "int4":
        return forms
    best = hopper_tiles(problem, tokens)
    if tokens > MOST_TOKENS:
        best = [tile for tile in best if not tile.scales_late][:2]
    else:
        best = [*{tile.scales_late: tile for tile in reversed(best)}.values()]
    return forms | {told(tile): on_hopper(tile) for tile in best}


def on_hopper(tile: HopperTile) -> Matmul:
    """The Mosaic kernel of int4 with a tile given."""
    return partial(hopper_int4, group_size=GROUP_SIZE, tile=tile)


def with_tile(kind: str, tile: MatmulTile) -> Matmul:
    """The Triton kernel with a tile given."""
    if kind == "int4":
        return partial(int4_tiles, group_size=GROUP_SIZE, tile=tile)

    def narrow(x: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
        if kind == "int8":
            return narrow_matmul(x, kernel, scale, None, dtype=x.dtype, tile=tile)
        limit = reference.INT8_MAX if kind == "w8a8" else reference.FP8_MAX
        values, rows = reference.quantize_rows(x, limit)
        values = jnp.round(values) if kind == "w8a8" else values
        return narrow_matmul(
            values.astype(kernel.dtype), kernel, scale, rows[:, 0], dtype=x.dtype, tile=tile
        )

    return narrow


def triton_forms(problem: Problem, tokens: int) -> Forms:
    """Every tile to try, by what it is."""
    tiles = triton_tiles(problem.kind, problem, tokens)
    return {told(tile): with_tile(problem.kind, tile) for tile in tiles}


def triton_tiles(kind: str, problem: Problem, tokens: int) -> Iterator[MatmulTile]:
    """The chosen tile first, then others around it."""
    numbers = (tokens, problem.outputs, problem.inputs)
    chosen = choose_triton_tile(*numbers, transposed=kind in ("fp8", "w8a8"))
    if kind == "int4":
        chosen = choose_int4_tile(*numbers)
    yield chosen
    if kind == "int4":
        # Twice the outputs read the activations half as often.
        wide = _triton.Launch(num_warps=8, num_stages=3)
        yield replace(chosen, transposed=True, block_n=256, launch=wide, splits=1)
        yield replace(chosen, transposed=True, block_n=256, launch=wide, splits=2)
    # Operands of 8 bits have their own instructions only where the weights stand first.
    orders = (True,) if kind in ("fp8", "w8a8") else (False, True)
    block_ks = (128,) if kind == "int4" else (128, 256)
    splits = (4, 8, 16) if problem.outputs < problem.inputs else (1, 2, 4)
    for order, block_n, block_k, parts, (warps, stages) in itertools.product(
        orders, (64, 128), block_ks, splits, ((2, 3), (4, 3), (4, 4))
    ):
        yield replace(
            chosen, block_n=block_n, block_k=block_k, transposed=order, splits=parts,
            launch=_triton.Launch(num_warps=warps, num_stages=stages),
        )  # fmt: skip


def mosaic_forms(problem: Problem, tokens: int) -> Forms:
    """The tiles that should be fastest, the chosen one first."""
    tiles = hopper_tiles(problem, tokens)[:MOSAIC_TILES]
    return {told(tile): on_hopper(tile) for tile in tiles}


def hopper_tiles(problem: Problem, tokens: int) -> list[HopperTile]:
    """For every size of tile the splits that should be best; the fastest size first."""
    numbers = (tokens, problem.inputs, problem.outputs)
    tiles = possible_tiles(*numbers, group_size=GROUP_SIZE)
    best: dict[Any, HopperTile] = {}
    for tile in sorted(tiles, key=lambda tile: tile.cycles(*numbers)):
        best.setdefault((tile.tokens, tile.rows, tile.scales_late), tile)
    return [*best.values()]


def told(tile: MatmulTile | HopperTile) -> str:
    """A tile in a few words."""
    if isinstance(tile, HopperTile):
        late = ", scaled sums" if tile.scales_late else ""
        return f"mosaic, {tile.tokens} x {tile.outputs} outputs, {tile.splits} splits{late}"
    sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}, {tile.splits} splits"
    order = "transposed" if tile.transposed else "straight"
    launch = f"{tile.launch.num_warps} warps, {tile.launch.num_stages} stages"
    return f"{sizes}, {order}, {launch}"

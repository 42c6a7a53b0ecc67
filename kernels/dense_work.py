"""What a program of `dense_matmul.py` works on: its tiles, its memory, and when it is worth it.

Traced inside the kernel, by all warpgroups alike; knows no products. The times are of an H200
(benchmarks/NOTES.md).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from swiftjax.kernels import _mosaic
from swiftjax.kernels.split_k import NUM_CORES

ROWS = 64  # tokens of a warpgroup, which are those of an instruction
PIECE_BYTES = 128  # of a row, that are multiplied together
STORED = 64  # columns that a warpgroup stores at once
CLUSTER = 2  # programs that share their weights: each loads a half for both
NEIGHBOURS = 8  # tiles of tokens that share weights while these are in the L2
SHARED_BYTES = 224 * 1024  # of 227: barriers and what alignment wastes need the rest

# Microseconds of a round of tiles over rows of 8 KiB, by warpgroups and columns, and of a launch.
ROUND_US = {(2, 256): 42.0, (1, 256): 26.0, (2, 128): 23.0, (1, 128): 14.5}
ROUND_BYTES, LAUNCH_US = 8192, 8.0
GATED_COLUMNS = 256  # gates and ups of narrower tiles would read tokens too often
# XLA leaves gates a pass of their own; ours is faster where rounds are nearly full, or few tokens
# leave XLA's product slow.
LEAST_FULL, FEW_TOKENS = 0.9, 256
LEAST_BUSY = 0.8  # of the multiprocessors: they read weights as fast as memory gives them
# With fewer tokens XLA is faster, and with more as fast. Of all it is where it adds up a sum over
# more inputs than there are outputs in parts.
LEAST_TOKENS, MOST_TOKENS = 256, 2048

Ref = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseTile:
    """Size of a tile."""

    warpgroups: int  # that compute, ROWS tokens each
    columns: int

    @property
    def rows(self) -> int:
        """Tokens of the tile."""
        return self.warpgroups * ROWS

    @property
    def stages(self) -> int:
        """Pieces of tokens and weights for which there is shared memory."""
        stored = self.warpgroups * 2 * ROWS * STORED * 2
        return (SHARED_BYTES - stored) // ((self.rows + self.columns) * PIECE_BYTES)

    def cluster(self, num_tokens: int) -> int:
        """Programs that share weights: where a tile has all tokens there is just one."""
        return 1 if num_tokens == self.rows else CLUSTER

    def fits(self, num_tokens: int, num_outputs: int) -> bool:
        """Whether tiles fill the product, a cluster of them at a time."""
        rows = self.cluster(num_tokens) * self.rows
        return num_tokens % rows == 0 and num_outputs % self.columns == 0

    def fullness(self, num_tokens: int, num_outputs: int) -> float:
        """How much of all rounds is work."""
        num_tiles = (num_tokens // self.rows) * (num_outputs // self.columns)
        return num_tiles / NUM_CORES / self._rounds(num_tokens, num_outputs)

    def microseconds(self, num_tokens: int, row_bytes: int, num_outputs: int) -> float:
        """About how long a product takes."""
        a_round = ROUND_US[self.warpgroups, self.columns] * row_bytes / ROUND_BYTES
        return LAUNCH_US + self._rounds(num_tokens, num_outputs) * a_round

    def _rounds(self, num_tokens: int, num_outputs: int) -> int:
        tiles = (num_tokens // self.rows) * (num_outputs // self.columns)
        return -(-tiles // NUM_CORES)


def choose_dense_tile(
    num_tokens: int, row_bytes: int, num_outputs: int, *, gated: bool = False
) -> DenseTile | None:
    """The tile that should be fastest; None where no tile fills the product."""
    if row_bytes % PIECE_BYTES:
        return None
    tiles = [DenseTile(warpgroups=w, columns=columns) for w, columns in ROUND_US]
    return min(
        (
            tile
            for tile in tiles
            if tile.fits(num_tokens, num_outputs) and (not gated or tile.columns == GATED_COLUMNS)
        ),
        key=lambda tile: tile.microseconds(num_tokens, row_bytes, num_outputs),
        default=None,
    )


class Plan(NamedTuple):
    """What is known when the kernel is compiled."""

    tile: DenseTile
    cluster: int
    outputs_first: bool  # weights are [N K]
    gated: bool
    has_residual: bool
    is_scaled: bool

    @property
    def parts(self) -> int:
        """Stretches of columns that a tile is made of: gates and their ups."""
        return 2 if self.gated else 1


class Arguments(NamedTuple):
    """What the kernel reads in device memory, and what it writes."""

    x: Ref  # [T K]
    kernel: Ref  # [K N] or [N K]
    residual: Ref | None  # like out
    row_scale: Ref | None  # [T]
    scale: Ref | None  # [N]
    out: Ref  # [T N], of gates [T N/2]


class Shared(NamedTuple):
    """Shared memory of a program, and the barriers that say who may touch it."""

    x: Ref  # [stages rows piece]
    kernel: Ref  # [stages parts ...], as in device memory: piece and columns
    stored: Ref  # [warpgroups 2 ROWS STORED]
    are_there: Ref
    are_free: Ref  # of both programs of a cluster


class Program(NamedTuple):
    """What stays the same while a program runs."""

    plan: Plan
    arguments: Arguments
    shared: Shared

    @property
    def num_outputs(self) -> int:
        """Columns of the product."""
        return self.arguments.out.shape[1] * self.plan.parts

    @property
    def piece(self) -> int:
        """Inputs that are multiplied together."""
        return self.shared.x.shape[2]

    @property
    def num_pieces(self) -> int:
        """Pieces of a sum."""
        return self.arguments.x.shape[1] // self.piece

    @property
    def num_work(self) -> int:
        """Tiles, counting those of a cluster as one."""
        rows = self.arguments.x.shape[0] // (self.plan.cluster * self.plan.tile.rows)
        return rows * (self.num_outputs // self.plan.tile.columns)


class Work(NamedTuple):
    """A tile: its first token, and the first column of each of its parts."""

    token: Any
    column: Any  # of `out`


def take_work(program: Program, number: Any) -> Work:
    """A tile by its number: most of those next to each other share weights, the others tokens."""
    plan, tile = program.plan, program.plan.tile
    columns = program.num_outputs // tile.columns
    rows = program.num_work // columns
    group = lax.div(number, jnp.int32(NEIGHBOURS * columns))
    inside = number - group * (NEIGHBOURS * columns)
    width = jnp.minimum(rows - group * NEIGHBOURS, NEIGHBOURS)
    row = (group * NEIGHBOURS + lax.rem(inside, width)) * plan.cluster
    row = row + _mosaic.number_in_cluster(plan.cluster)
    return Work(token=row * tile.rows, column=lax.div(inside, width) * (tile.columns // plan.parts))

"""What a program of `hopper_matmul.py` works on: its memory, and which tiles it takes in turn.

Traced inside the kernel, by all warpgroups alike. Knows nothing about weights but how many make a
step and how many share a scale.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from swiftjax.kernels.hopper_weights import INPUTS, PARTS, STEP, WORDS
from swiftjax.kernels.split_k import NUM_CORES

BLOCK = 64  # rows of an instruction
NUM_COMPUTING = 2  # warpgroups
NEIGHBOURS = 8  # tiles of tokens that share weights while these are in the L2

SHARED_BYTES = 224 * 1024  # of 227: barriers and what alignment wastes need the rest
MOST_STAGES = 16
LEAST_STEPS = 8  # of a part of the sum
# For choosing a tile, in cycles of a multiprocessor; fitted to 18 products of an H200, which it
# gives within 7 % (benchmarks/NOTES.md). A step's own; how much is not hidden of multiplying and
# unpacking, as the compiler's output has them, and of storing; adding parts.
STEP_CYCLES, MULTIPLIED, UNPACKED, STORED, ADD_CYCLES = 313, 0.77, 0.89, 0.69, 2400
L2_BYTES = 28  # that a multiprocessor gets in a cycle

Ref = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperTile:
    """Size of a tile, and parts of the sum."""

    tokens: int  # 16, 32, 64, 128 or 256
    rows: int  # outputs of a warpgroup: 64, or with up to 128 tokens 128
    splits: int = 1
    scales_late: bool = False  # scales of groups are for sums, not for weights: half the registers

    @property
    def blocks(self) -> int:
        """Pieces of a warpgroup's rows that are multiplied one after the other."""
        return self.rows // BLOCK

    @property
    def outputs(self) -> int:
        """Outputs of the tile."""
        return NUM_COMPUTING * self.rows

    @property
    def itemsize(self) -> int:
        """Bytes of a result: parts of a sum are float32."""
        return 2 if self.splits == 1 else 4

    @property
    def stored(self) -> int:
        """Tokens that a warpgroup stores at once."""
        return min(64 // self.itemsize, self.tokens)

    def stages(self, groups: int) -> tuple[int, int]:
        """Pieces of activations and steps of weights for which there is shared memory."""
        step = self.outputs * (4 * WORDS + 5 * groups)
        piece = 2 * self.tokens * INPUTS
        stored = NUM_COMPUTING * 2 * self.stored * self.rows * self.itemsize
        room = SHARED_BYTES - stored
        steps = min(MOST_STAGES, room // (step + PARTS * piece) + 1)
        return min(MOST_STAGES, (room - steps * step) // piece), steps

    def is_for(self, num_inputs: int, num_outputs: int, group_size: int) -> bool:
        """Whether tiles and steps fill this matrix."""
        if self.scales_late and group_size % INPUTS:
            return False
        return num_inputs % STEP == 0 and num_outputs % self.outputs == 0

    def cycles(self, num_tokens: int, num_inputs: int, num_outputs: int) -> float:
        """About how long a product takes: rounds of all multiprocessors, times one tile."""
        work = self.splits * (num_outputs // self.outputs) * -(-num_tokens // self.tokens)
        multiplied = self.outputs * self.tokens * STEP / 2048
        # Scales of sums cost less than those of weights, but as much more as there are tokens.
        scaling = 0.54 + 0.0032 * self.tokens if self.scales_late else 1.0
        unpacked = scaling * self.outputs * STEP / 22
        copied = (2 * self.tokens * STEP + 4 * self.outputs * WORDS) / L2_BYTES
        step = max(STEP_CYCLES + MULTIPLIED * multiplied + UNPACKED * unpacked, copied)
        share = -(-(num_inputs // STEP) // self.splits)
        # Parts of a sum are written and read again.
        passes, added = (1, 0) if self.splits == 1 else (2, ADD_CYCLES)
        stored = STORED * passes * self.outputs * self.tokens * self.itemsize / L2_BYTES
        return -(-work // NUM_CORES) * (share * step + stored) + added


def possible_tiles(
    num_tokens: int, num_inputs: int, num_outputs: int, *, group_size: int
) -> list[HopperTile]:
    """Tiles that fill the matrix and are not mostly padding."""
    tiles = [
        HopperTile(tokens=tokens, rows=rows, splits=splits, scales_late=late)
        for tokens in (16, 32, 64, 128, 256)
        for rows in (64, 128)
        for splits in (1, 2, 4, 8)
        for late in (False, True)
        if rows * tokens <= 64 * (128 if late else 256)
        and (tokens == 16 or tokens < 2 * num_tokens)
        and (splits == 1 or num_inputs // STEP >= LEAST_STEPS * splits)
    ]
    return [tile for tile in tiles if tile.is_for(num_inputs, num_outputs, group_size)]


def choose_tile(
    num_tokens: int, num_inputs: int, num_outputs: int, *, group_size: int
) -> HopperTile | None:
    """The tile that should be fastest; None where no tile fills the matrix."""
    numbers = (num_tokens, num_inputs, num_outputs)
    tiles = possible_tiles(*numbers, group_size=group_size)
    return min(tiles, key=lambda tile: tile.cycles(*numbers), default=None)


class Arguments(NamedTuple):
    """What the kernel reads in device memory, and what it writes."""

    exponents: Ref  # [planes]: as memory, since of two constants an instruction takes but one
    x: Ref  # [T K]
    words: Ref  # [N words]
    scale: Ref  # [G N]
    zero: Ref  # [G N]
    out: Ref  # [S T N]


class Shared(NamedTuple):
    """Shared memory of a program, and the barriers that say who may touch it."""

    x: Ref  # [stages tokens INPUTS]
    words: Ref  # [stages outputs WORDS]
    stored: Ref  # [NUM_COMPUTING 2 tokens rows]
    x_is_there: Ref
    x_is_free: Ref
    words_are_there: Ref
    words_are_free: Ref
    scale: Ref  # [stages groups outputs]
    zero: Ref


class Program(NamedTuple):
    """What stays the same while a program runs."""

    arguments: Arguments
    shared: Shared
    groups: int  # of a step
    tile: HopperTile


class Work(NamedTuple):
    """One tile: where it begins in the product, and which steps it adds up."""

    token: Any
    output: Any
    part: Any
    begin: Any
    end: Any

    @property
    def num_steps(self) -> Any:
        """Steps in all."""
        return self.end - self.begin


def count_work(tile: HopperTile, num_tokens: int, num_outputs: int) -> int:
    """Tiles of a product, parts of the sum counted apart."""
    return tile.splits * (num_outputs // tile.outputs) * (num_tokens // tile.tokens)


def take_work(program: Program, number: Any) -> Work:
    """A tile by its number: most of those next to each other share weights, the others tokens."""
    arguments, _, _, tile = program
    _, num_tokens, num_outputs = arguments.out.shape
    rows, columns = num_tokens // tile.tokens, num_outputs // tile.outputs
    group = lax.div(number, jnp.int32(NEIGHBOURS * columns * tile.splits))
    inside = number - group * (NEIGHBOURS * columns * tile.splits)
    width = jnp.minimum(rows - group * NEIGHBOURS, NEIGHBOURS)
    column = lax.div(inside, width)
    part = lax.div(column, jnp.int32(columns))
    steps = arguments.x.shape[1] // STEP
    share = -(-steps // tile.splits)
    return Work(
        token=(group * NEIGHBOURS + lax.rem(inside, width)) * tile.tokens,
        output=lax.rem(column, jnp.int32(columns)) * tile.outputs,
        part=part,
        begin=part * share,
        end=jnp.minimum((part + 1) * share, steps),
    )

"""The few shapes that steps are padded to: which there are, and which one holds a step.

A decode bucket has one token per sequence (T == B); every other bucket is a mixed one with
B == max_num_seqs and T > B. Made once where an engine is built; `batching.py` lays batches out.
"""

from dataclasses import dataclass, replace
from functools import partial

from swiftjax.batch import BatchShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The few shapes that steps are padded to, smallest first."""

    decode: tuple[BatchShape, ...]
    mixed: tuple[BatchShape, ...]
    # In place of an equal one in `mixed` where the step is one prompt, from its first token on.
    whole_prompt: BatchShape | None = None

    @property
    def all(self) -> tuple[BatchShape, ...]:
        """Every shape that can occur: what a warm-up compiles."""
        return (*self.decode, *self.mixed, *([self.whole_prompt] if self.whole_prompt else []))

    def choose(
        self,
        num_tokens: int,
        num_seqs: int,
        *,
        scores_prompt: bool = False,
        whole_prompt: bool = False,
    ) -> BatchShape:
        """The smallest bucket that holds a step; prompts are scored in mixed ones only."""
        is_decode = num_tokens == num_seqs and not scores_prompt
        fitting = self.decode if is_decode and self.decode else self.mixed
        shape = next(b for b in fitting if b.num_tokens >= num_tokens and b.num_seqs >= num_seqs)
        special = self.whole_prompt if whole_prompt else None
        return special if special and special.num_tokens == shape.num_tokens else shape

    def with_whole_prompt(self) -> "Buckets":
        """With a program of its own for a prompt that fills the largest bucket alone."""
        return replace(self, whole_prompt=replace(self.mixed[-1], whole_prompt=True))


def make_single_bucket(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_pages: int, streams: bool = False
) -> Buckets:
    """One shape for every step, decodes included: what a row gives never hangs on the batch."""
    largest = max(max_num_batched_tokens, max_num_seqs + 1)
    shape = BatchShape(
        num_tokens=largest, num_seqs=max_num_seqs, max_pages=max_pages, streams=streams
    )
    return Buckets(decode=(), mixed=(shape,))


def make_invariant_buckets(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_pages: int, filled_rows: int
) -> Buckets:
    """Buckets for kernels that fill up products to `filled_rows`: no decode bucket is smaller."""
    largest = max(max_num_batched_tokens, max_num_seqs + 1)
    shape = partial(BatchShape, max_pages=max_pages)
    sizes = [max_num_seqs]
    while sizes[-1] > filled_rows:
        sizes.append(_half(sizes[-1]))
    return Buckets(
        decode=tuple(shape(num_tokens=size, num_seqs=size) for size in reversed(sizes)),
        mixed=tuple(
            shape(num_tokens=t, num_seqs=max_num_seqs) for t in _fine_sizes(largest, max_num_seqs)
        ),
    )


def make_buckets(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_pages: int,
    fine: bool = False,
    streams: bool = False,
) -> Buckets:
    """Decode buckets double; mixed ones shrink by 4 from the token budget.

    `fine` is for a GPU: more mixed buckets, as padding costs more than another program does, and up
    to 32 rows decode buckets of 1, 8 and 32 only, as a matrix product then takes as long as its
    weights take to be read. But the fewer rows, the more parts attention cuts each context into, to
    fill the chip: so a row alone does not count as 8. Chunks of long prompts fill the largest.
    """
    sizes = [max_num_seqs]
    while sizes[-1] > 1:
        half = _half(sizes[-1])
        sizes.append(_NEXT_ON_GPU.get(half, half) if fine else half)
    largest = max(max_num_batched_tokens, max_num_seqs + 1)
    tokens = (_fine_sizes if fine else _coarse_sizes)(largest, max_num_seqs)
    shape = partial(BatchShape, max_pages=max_pages, streams=streams)
    return Buckets(
        decode=tuple(shape(num_tokens=b, num_seqs=b) for b in reversed(sizes)),
        mixed=tuple(
            shape(num_tokens=t, num_seqs=max_num_seqs, long_chunks=t == largest)
            for t in sorted(tokens)
        ),
    )


# Sizes of decode buckets that a GPU does without, and the next smaller ones that it has.
_NEXT_ON_GPU = {16: 8, 4: 1, 2: 1}


def _half(size: int) -> int:
    """The next smaller power of two."""
    return 1 << ((size - 1).bit_length() - 1)


def _coarse_sizes(largest: int, max_num_seqs: int) -> list[int]:
    sizes = [largest]
    while sizes[-1] // 4 > max_num_seqs and sizes[-1] // 4 >= 16:
        sizes.append(sizes[-1] // 4)
    return sizes


def _fine_sizes(largest: int, max_num_seqs: int) -> list[int]:
    """Halves down to room for as many prompt tokens as decodes; three quarters of small ones."""
    least, sizes, size = max(2 * max_num_seqs, 128), [largest], largest
    while size >= least:
        sizes += [size, size * 3 // 4] if least < size <= 2048 else [size]
        size //= 2
    return sorted(size for size in set(sizes) if size >= least or size == largest)

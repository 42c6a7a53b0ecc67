"""Turns a plan into a Batch of one of a few padded shapes. Padding lives only here.

A decode bucket has one token per sequence (T == B); every other bucket is a mixed one with
B == max_num_seqs and T > B.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from swiftjax.batch import Batch, BatchShape, SamplingBatch, empty_batch
from swiftjax.engine.request import Request
from swiftjax.engine.scheduler import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The few shapes that steps are padded to, smallest first."""

    decode: tuple[BatchShape, ...]
    mixed: tuple[BatchShape, ...]

    @property
    def all(self) -> tuple[BatchShape, ...]:
        """Every shape that can occur: what a warm-up compiles."""
        return (*self.decode, *self.mixed)

    def choose(self, num_tokens: int, num_seqs: int) -> BatchShape:
        """The smallest bucket that holds a step."""
        fitting = self.decode if num_tokens == num_seqs else self.mixed
        return next(b for b in fitting if b.num_tokens >= num_tokens and b.num_seqs >= num_seqs)


def make_buckets(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_pages: int, min_decode: int = 1
) -> Buckets:
    """Decode buckets double from `min_decode`; mixed ones shrink by 4 from the token budget."""
    sizes = [max_num_seqs]
    while sizes[-1] > min_decode:
        sizes.append(max(min_decode, 1 << ((sizes[-1] - 1).bit_length() - 1)))
    tokens = [max(max_num_batched_tokens, max_num_seqs + 1)]
    while tokens[-1] // 4 > max_num_seqs and tokens[-1] // 4 >= 16:
        tokens.append(tokens[-1] // 4)
    return Buckets(
        decode=tuple(
            BatchShape(num_tokens=b, num_seqs=b, max_pages=max_pages) for b in reversed(sizes)
        ),
        mixed=tuple(
            BatchShape(num_tokens=t, num_seqs=max_num_seqs, max_pages=max_pages)
            for t in reversed(tokens)
        ),
    )


def make_batch(plan: Plan, buckets: Buckets, *, page_size: int, num_slots: int) -> Batch:
    """Lay a plan out in the smallest bucket that holds it; `num_slots` is pages * page_size."""
    num_tokens = sum(work.num_new for work in plan.work)
    batch = empty_batch(buckets.choose(num_tokens, len(plan.work)), num_slots)
    starts = np.cumsum([0, *(work.num_new for work in plan.work)])
    batch.query_starts[: len(starts)] = starts
    batch.query_starts[len(starts) :] = num_tokens
    row = 0
    for i, ((first, last), work) in enumerate(zip(pairwise(starts), plan.work, strict=True)):
        sequence, end = work.sequence, work.start + work.num_new
        pages = np.asarray(sequence.page_ids, np.int32)
        positions = np.arange(work.start, end, dtype=np.int32)
        batch.token_ids[first:last] = sequence.token_ids[work.start : end]
        batch.positions[first:last] = positions
        batch.slot_mapping[first:last] = (
            pages[positions // page_size] * page_size + positions % page_size
        )
        batch.context_lens[i] = end
        batch.prompt_lens[i] = sequence.prompt_len
        batch.page_table[i, : len(pages)] = pages
        if work.samples:
            batch.sample_rows[row] = last - 1
            _fill_sampling(batch.sampling, row, work.sequence.request, end)
            row += 1
    return batch


def _fill_sampling(sampling: SamplingBatch, row: int, request: Request, position: int) -> None:
    config = request.generation
    sampling.temperature[row] = config.temperature
    sampling.top_k[row] = config.top_k
    sampling.top_p[row] = config.top_p
    halves = np.array([request.seed & 0xFFFFFFFF, request.seed >> 32], np.uint32)
    sampling.seeds[row] = halves.view(np.int32)
    sampling.sample_positions[row] = position

"""Turns a plan into a Batch of one of a few padded shapes. Padding lives only here.

A decode bucket has one token per sequence (T == B); every other bucket is a mixed one with
B == max_num_seqs and T > B.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress

import numpy as np

from swiftjax.batch import (
    ALL_ALLOWED,
    SAMPLING_FIELDS,
    Batch,
    BatchShape,
    TokenEdits,
    empty_batch,
    empty_edits,
)
from swiftjax.engine.plan import Plan
from swiftjax.engine.results import scores_of
from swiftjax.engine.rows import RowTable
from swiftjax.engine.sequence import Sequence


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


def make_buckets(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_pages: int,
    min_decode: int = 1,
    fine: bool = False,
    streams: bool = False,
) -> Buckets:
    """Decode buckets double, except from 8 to 32; mixed ones shrink by 4 from the token budget.

    `fine` makes more mixed buckets: padding costs a GPU more than another program does. The chunks
    of long prompts fill the largest.
    """
    sizes = [max_num_seqs]
    while sizes[-1] > min_decode:
        half = 1 << ((sizes[-1] - 1).bit_length() - 1)
        # Up to 32 rows a matrix product on a GPU takes as long as its weights take to be read.
        sizes.append(max(min_decode, 8 if fine and half == 16 else half))
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


def make_batch(
    plan: Plan, rows: RowTable, buckets: Buckets, *, page_size: int, num_slots: int
) -> Batch:
    """Lay a plan out in the smallest bucket that holds it; `num_slots` is pages * page_size."""
    count = len(plan.work)
    # Column by column: three passes over the work cost more than turning it round once.
    sequences, first, new, sampled = zip(*plan.work, strict=True)
    starts, num_new, samples = np.array(first, np.int32), np.array(new, np.int32), np.array(sampled)
    row_ids = np.fromiter((sequence.row for sequence in sequences), np.int32, count)
    ends = np.cumsum(num_new, dtype=np.int32)
    num_tokens = int(ends[-1])
    scores_prompt = any(scores_of(w) for w in plan.work if w.sequence.num_to_score)
    shape = buckets.choose(
        num_tokens,
        count,
        scores_prompt=scores_prompt,
        whole_prompt=count == 1 and starts[0] == 0,
    )
    ruled = [(row, s) for row, s in enumerate(compress(sequences, samples)) if s.rules is not None]
    edits, masks = _make_edits(ruled, shape.num_seqs), _make_masks(ruled, shape.num_seqs)
    batch = empty_batch(shape, num_slots, edits=edits, masks=masks)
    batch.query_starts[1 : count + 1] = ends
    batch.query_starts[count + 1 :] = num_tokens
    gone = rows.num_dropped[row_ids] * np.int32(page_size)
    batch.context_lens[:count] = starts + num_new - gone
    batch.prompt_lens[:count] = rows.prompt_lens[row_ids]
    # The one large array of a batch: not by way of a copy. ("clip" is what lets it write there.)
    np.take(rows.page_table, row_ids, axis=0, out=batch.page_table[:count], mode="clip")
    if batch.windows is not None and batch.sink_lens is not None:
        batch.windows[:count] = rows.windows[row_ids]
        batch.sink_lens[:count] = rows.sink_lens[row_ids]
    _fill_tokens(batch, plan, row_ids, starts, num_new, gone, page_size)
    _fill_sampling(batch, rows, row_ids[samples], ends[samples] - 1)
    if scores_prompt:
        _fill_targets(batch, plan)
    return batch


def _fill_tokens(
    batch: Batch,
    plan: Plan,
    row_ids: np.ndarray,
    starts: np.ndarray,
    num_new: np.ndarray,
    gone: np.ndarray,
    page_size: int,
) -> None:
    """Token ids, positions and slots of every real token, all [T].

    `gone` counts tokens of each sequence whose pages are no longer in its table.
    """
    ends = np.cumsum(num_new, dtype=np.int32)
    num_tokens = int(ends[-1])
    owner = np.repeat(np.arange(len(starts), dtype=np.int32), num_new)
    first = ends - num_new
    positions = np.arange(num_tokens, dtype=np.int32) - (first - starts)[owner]
    pages = batch.page_table[owner, (positions - gone[owner]) // page_size]
    batch.positions[:num_tokens] = positions
    batch.slot_mapping[:num_tokens] = pages * page_size + positions % page_size
    batch.token_ids[:num_tokens] = np.fromiter(_new_tokens(plan), np.int32, num_tokens)
    num_read = np.fromiter((len(w.sequence.token_ids) for w in plan.work), np.int32, len(starts))
    unread = np.flatnonzero(starts + num_new > num_read)
    batch.token_sources[ends[unread] - 1] = row_ids[unread]


def _new_tokens(plan: Plan) -> Iterator[int]:
    for sequence, start, num_new, _ in plan.work:
        tokens = sequence.token_ids
        if num_new == 1:
            # A token that was not read yet is known to the device only.
            yield tokens[start] if start < len(tokens) else 0
        else:
            yield from tokens[start : start + num_new]


def _fill_sampling(
    batch: Batch, rows: RowTable, row_ids: np.ndarray, token_rows: np.ndarray
) -> None:
    """Settings of the sampled rows; the sampled token comes after the last computed one."""
    count = len(row_ids)
    batch.sample_rows[:count] = token_rows
    for name in SAMPLING_FIELDS:
        getattr(batch.sampling, name)[:count] = getattr(rows.sampling, name)[row_ids]
    batch.sampling.sample_positions[:count] = batch.positions[token_rows] + 1


def _fill_targets(batch: Batch, plan: Plan) -> None:
    """The token after each prompt token whose score is asked for and not known yet."""
    offset = 0
    for work in plan.work:
        if span := scores_of(work):
            targets = work.sequence.token_ids[span.start + 1 : span.stop + 1]
            first = offset + span.start - work.start
            batch.target_ids[first : first + len(targets)] = targets
        offset += work.num_new


def _make_edits(ruled: list[tuple[int, Sequence]], num_rows: int) -> TokenEdits | None:
    """Biases and bans of the rows that have any; None if no row has."""
    edits: TokenEdits | None = None
    for row, sequence in ruled:
        if sequence.rules is None or not sequence.rules.has_edits:
            continue
        if edits is None:
            edits = empty_edits(num_rows)
        values = sequence.rules.edits(sequence.token_ids)
        edits.ids[row, : len(values)] = list(values)
        edits.values[row, : len(values)] = list(values.values())
        edits.only_listed[row] = sequence.rules.only_listed
    return edits


def _make_masks(
    ruled: list[tuple[int, Sequence]], num_rows: int
) -> Callable[[], np.ndarray] | None:
    """What finds out, when called, what constraints allow next; None if no row has any."""
    bound = [
        (row, sequence, sequence.rules.grammar)
        for row, sequence in ruled
        if sequence.rules is not None and sequence.rules.grammar is not None
    ]
    if not bound:
        return None

    def fill() -> np.ndarray:
        """The words of masks, [R W] int32; every token in rows without a constraint."""
        masks = np.full((num_rows, bound[0][2].num_words), ALL_ALLOWED, np.int32)
        for row, sequence, grammar in bound:
            grammar.fill(sequence.token_ids, masks[row])
        return masks

    return fill

"""Turns a plan into a Batch of one of a few shapes (`buckets.py`). Padding lives only here."""

from collections.abc import Callable, Iterator
from itertools import compress

import numpy as np

from swiftjax.batch import (
    ALL_ALLOWED,
    SAMPLING_FIELDS,
    Batch,
    TokenEdits,
    empty_batch,
    empty_edits,
)
from swiftjax.engine.buckets import Buckets
from swiftjax.engine.plan import Plan
from swiftjax.engine.results import scores_of
from swiftjax.engine.rows import RowTable
from swiftjax.engine.sequence import Sequence


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

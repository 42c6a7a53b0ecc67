"""The values that the control plane and the data plane share: what a step does and returns.

On the host a Batch holds numpy arrays (built in `engine/batching.py`, the only place that pads);
inside `jit` the same class is a pytree of traced arrays.

Dimension alphabet, used in annotations, einsums and comments everywhere:

    T  tokens in this step (padded)          N  query heads        P  pages in the pool
    B  sequences in this step (padded)       K  KV heads           S  slots per page
    R  rows that get logits (padded)         G  N / K              M  max pages per sequence
    D  model width    F  MLP width           H  head width         V  vocabulary    L  layers
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

Array = Any  # a numpy array on the host, a jax array inside jit; this module imports no jax

NONE = 2**31 - 1  # an id or row past every end: reads of it give nothing, writes are dropped
MAX_EDITS = 1024  # E: most entries of one row of TokenEdits
PROMPT_BIT = 2**15  # in a token count: the token is in the prompt; the bits below count its output
MAX_COUNT = 2**15 - 1  # counts of output tokens stop here
ALL_ALLOWED = -1  # a word of a token mask: 32 tokens, a bit each, the lowest id lowest
NUM_TOP = 20  # most likely tokens that a step reports at most


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingBatch:
    """How each of the R rows is sampled. Greedy is temperature 0: a row like any other."""

    temperature: Array  # [R] float32
    top_k: Array  # [R] int32, 0 keeps the whole vocabulary
    top_p: Array  # [R] float32
    min_p: Array  # [R] float32
    typical_p: Array  # [R] float32
    repetition_penalty: Array  # [R] float32
    presence_penalty: Array  # [R] float32
    frequency_penalty: Array  # [R] float32
    token_rows: Array  # [R] int32, row of the last tokens; NONE for padding
    count_rows: Array  # [R] int32, row of the token counts; NONE without penalties
    num_logprobs: Array  # [R] int32, how many most likely tokens are asked for
    processed: Array  # [R] int32, 1 where logprobs are of the processed scores
    seeds: Array  # [R 2] int32, the two halves of a 64-bit seed (bits, not values)
    sample_positions: Array  # [R] int32, position of the token that will be sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEdits:
    """What is added to the scores of single tokens; -inf bans one. Padding: id NONE."""

    ids: Array  # [R E] int32, distinct within a row, real ones first
    values: Array  # [R E] float32
    only_listed: Array  # [R] int32, 1 bans every token that is not listed


SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingBatch))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """The padded sizes of one compiled step."""

    num_tokens: int  # T
    num_seqs: int  # B, and R: one sampled row per sequence
    max_pages: int  # M
    streams: bool = False  # whether sequences may have sinks and windows of their own
    whole_prompt: bool = False  # one sequence only, and none of it in the cache
    long_chunks: bool = False  # where long prompts go: worth a kernel that every start compiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One ragged step: prefill chunks and decodes mixed, tokens of a sequence side by side.

    Padding: token_ids and positions 0, slot_mapping P*S (past the end, so the write is dropped),
    context_lens 0, page_table 0 under the mask of context_lens, query_starts repeats its last
    value. `-1` is never used as an index. A step in which every sequence has exactly one new token
    has T == B (a decode bucket); every other bucket has T > B, so the shapes alone say which.

    Pages that a streaming sequence has given back are not in its table: `context_lens` counts
    without their tokens, and `positions` alone, which the rotation reads, count with them.

    A token that was sampled but not read yet has a source: its sequence's row in the last tokens,
    which stay on the device.
    """

    shape: BatchShape  # static inside jit
    token_ids: Array  # [T] int32
    token_sources: Array  # [T] int32, row of the last tokens to read instead; NONE: token_ids
    positions: Array  # [T] int32
    slot_mapping: Array  # [T] int32, page * S + offset
    query_starts: Array  # [B+1] int32, first token of each sequence
    context_lens: Array  # [B] int32, tokens in the pages of the table after this step
    prompt_lens: Array  # [B] int32, length of the prompt (dynamic RoPE scales by it)
    page_table: Array  # [B M] int32
    sink_lens: Array | None  # [B] int32, first tokens that stay visible; None: no streaming engine
    windows: Array | None  # [B] int32, last tokens that are visible, 0: all; None likewise
    sample_rows: Array  # [R] int32, index into T
    target_ids: Array  # [T] int32, prompt token to score from here; NONE where none is asked
    sampling: Any  # SamplingBatch; None inside the model, which does not sample, like target_ids
    edits: TokenEdits | None  # None when no row has any; then nothing is sent
    # Gives allowed tokens, [R W] int32, W = ceil(V / 32). Called when the forward pass has been
    # started, so that finding them takes none of the step's time. None likewise.
    masks: Callable[[], np.ndarray] | None = None


def empty_sampling(num_rows: int) -> SamplingBatch:
    """Greedy rows."""
    return SamplingBatch(
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        typical_p=np.ones(num_rows, np.float32),
        repetition_penalty=np.ones(num_rows, np.float32),
        presence_penalty=np.zeros(num_rows, np.float32),
        frequency_penalty=np.zeros(num_rows, np.float32),
        token_rows=np.full(num_rows, NONE, np.int32),
        count_rows=np.full(num_rows, NONE, np.int32),
        num_logprobs=np.zeros(num_rows, np.int32),
        processed=np.zeros(num_rows, np.int32),
        seeds=np.zeros((num_rows, 2), np.int32),
        sample_positions=np.zeros(num_rows, np.int32),
    )


def empty_edits(num_rows: int) -> TokenEdits:
    """Rows without edits."""
    return TokenEdits(
        ids=np.full((num_rows, MAX_EDITS), NONE, np.int32),
        values=np.zeros((num_rows, MAX_EDITS), np.float32),
        only_listed=np.zeros(num_rows, np.int32),
    )


def empty_batch(
    shape: BatchShape,
    num_slots: int,
    edits: TokenEdits | None = None,
    masks: Callable[[], np.ndarray] | None = None,
) -> Batch:
    """A batch of nothing but padding: what a warm-up runs, and what `make_batch` fills in."""
    tokens, seqs, pages = shape.num_tokens, shape.num_seqs, shape.max_pages
    return Batch(
        shape=shape,
        token_ids=np.zeros(tokens, np.int32),
        token_sources=np.full(tokens, NONE, np.int32),
        positions=np.zeros(tokens, np.int32),
        slot_mapping=np.full(tokens, num_slots, np.int32),
        query_starts=np.zeros(seqs + 1, np.int32),
        context_lens=np.zeros(seqs, np.int32),
        prompt_lens=np.zeros(seqs, np.int32),
        page_table=np.zeros((seqs, pages), np.int32),
        sink_lens=np.zeros(seqs, np.int32) if shape.streams else None,
        windows=np.zeros(seqs, np.int32) if shape.streams else None,
        sample_rows=np.zeros(seqs, np.int32),
        target_ids=np.full(tokens, NONE, np.int32),
        sampling=empty_sampling(seqs),
        edits=edits,
        masks=masks,
    )


class Scores(NamedTuple):
    """Log-probabilities on the host, one row per token."""

    logprobs: np.ndarray  # [rows] float32
    top_ids: np.ndarray  # [rows NUM_TOP] int32, most likely first; NONE past a small vocabulary
    top_logprobs: np.ndarray  # [rows NUM_TOP] float32


class Sampled(NamedTuple):
    """What a step returned to the host for its sampled rows, in plan order."""

    token_ids: list[int]
    logprobs: list[float]
    top: Scores | None = None  # [R]; only if a row asked
    prompt: Scores | None = None  # [T], valid where the batch had a target; only if one asked


class PageMove(NamedTuple):
    """The pages of one sequence, leaving the device for a copy under a key, or coming back.

    The key is a request id, or that of what a session keeps.
    """

    key: str
    page_ids: tuple[int, ...]


class PageCopy(NamedTuple):
    """One page of the device is copied to another, for a sequence that will write to it."""

    source: int
    target: int


class PageMoves(NamedTuple):
    """Page traffic before a step, in this order: out, back, copies, host copies to drop.

    What comes back stays on the host until it is dropped. No page is both a source and a target of
    `copies`.
    """

    out: tuple[PageMove, ...] = ()
    back: tuple[PageMove, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    drop: tuple[str, ...] = ()

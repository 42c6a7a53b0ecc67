"""Host arrays with one row per running sequence: what a batch is gathered from.

What a sequence asks for is written once, when it is admitted; its page row grows with its pages. So
building a step costs a few array gathers, however many sequences run and however long they are.
Rows are given out by `SequenceTable`, read by `batching.py`.
"""

import numpy as np

from swiftjax.batch import MAX_COUNT, NONE, PROMPT_BIT, SamplingBatch, empty_sampling
from swiftjax.engine.request import GenerationConfig, Request
from swiftjax.engine.sequence import Sequence

# Settings that a SamplingBatch takes as they are.
_SAME_NAMED = (
    "temperature", "top_k", "top_p", "min_p", "typical_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


class RowTable:
    """Rows 0 <= row < num_rows; a row belongs to one running sequence at a time."""

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self.page_table = np.zeros((num_rows, max_pages), np.int32)
        self.prompt_lens = np.zeros(num_rows, np.int32)
        self.sink_lens = np.zeros(num_rows, np.int32)
        self.windows = np.zeros(num_rows, np.int32)  # 0 for those that forget nothing
        self.num_dropped = np.zeros(num_rows, np.int32)  # pages given back behind the sinks
        self.sampling = empty_sampling(num_rows)
        self._free = list(range(num_rows - 1, -1, -1))

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence a row and write what it asks for."""
        sequence.row = row = self._free.pop()
        self.prompt_lens[row] = sequence.prompt_len
        streaming = sequence.request.generation.streaming
        self.sink_lens[row] = streaming.sink if streaming else 0
        self.windows[row] = streaming.window if streaming else 0
        _write_sampling(self.sampling, row, sequence.request)
        self.set_pages(sequence, 0)

    def set_pages(self, sequence: Sequence, start: int) -> None:
        """Copy the page ids of a sequence from index `start` on."""
        self.num_dropped[sequence.row] = sequence.num_dropped
        pages = sequence.page_ids[start:]
        self.page_table[sequence.row, start : start + len(pages)] = pages

    def release(self, sequence: Sequence) -> None:
        """Take the row back."""
        self._free.append(sequence.row)
        sequence.row = -1


def _write_sampling(sampling: SamplingBatch, row: int, request: Request) -> None:
    config = request.generation
    for name in _SAME_NAMED:
        getattr(sampling, name)[row] = getattr(config, name)
    sampling.token_rows[row] = row
    sampling.count_rows[row] = row if has_penalties(config) else NONE
    sampling.num_logprobs[row] = config.logprobs or 0
    sampling.processed[row] = config.logprobs_mode == "processed"
    halves = np.array([request.seed & 0xFFFFFFFF, request.seed >> 32], np.uint32)
    sampling.seeds[row] = halves.view(np.int32)


def has_penalties(config: GenerationConfig) -> bool:
    """Whether the tokens seen so far must be counted."""
    neutral = (1.0, 0.0, 0.0)
    asked = (config.repetition_penalty, config.presence_penalty, config.frequency_penalty)
    return asked != neutral


def count_tokens(sequence: Sequence, vocab_size: int) -> np.ndarray:
    """The row of token counts, [V] uint16: 2**15 for a prompt token plus uses in the output.

    Counted from the tokens themselves, so neither preemption nor cached pages can lose any.
    """
    output = np.bincount(sequence.token_ids[sequence.prompt_len :], minlength=vocab_size)
    counts = np.minimum(output, MAX_COUNT).astype(np.uint16)
    counts[np.asarray(sequence.request.prompt_token_ids)] |= PROMPT_BIT
    return counts

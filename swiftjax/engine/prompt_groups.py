"""Computes prompts in groups that fill steps, for batches of which nobody watches single tokens.

A few prompt tokens make a step of decodes much longer, and many do not make it much longer than a
few. So newcomers wait for company, and decodes for prompts that fill a step without them; both for
so long only as a whole batch ends sooner for it. Off, it holds back nobody. Asked by `Admission`.
"""

from collections.abc import Iterable

from swiftjax.config import SchedulerConfig
from swiftjax.engine.plan import PlanDraft
from swiftjax.engine.sequence import Sequence
from swiftjax.engine.sequence_pages import SequencePages
from swiftjax.engine.sequence_table import SequenceTable

# Steps in a row that decodes may wait: prompts that end with their first token free their rows, and
# could come for ever.
MOST_HELD = 32


class PromptGroups:
    """Says who is held back in a plan, and how long, for one scheduler."""

    def __init__(
        self, config: SchedulerConfig, sequences: SequenceTable, pages: SequencePages
    ) -> None:
        self._is_on = config.group_prompts
        self._max_num_seqs = config.max_num_seqs
        self._sequences = sequences
        self._pages = pages
        self._num_idle = 0  # free rows of all steps since newcomers began to wait for company
        self._num_held = 0  # steps in a row in which decodes waited

    def decodes_wait(
        self, draft: PlanDraft, prompts: Iterable[Sequence], num_free_rows: int
    ) -> bool:
        """Whether `prompts`, which run, and those that wait fill a step that is still empty.

        Never where somebody waits for a row or for pages, as decodes free them, nor for ever: it
        counts, and is asked once a plan. A guess, as prefixes may be cached: what such a step has
        left is for the decodes.
        """
        fills = self._num_held < MOST_HELD and self._fill_step(draft, prompts, num_free_rows)
        self._num_held = self._num_held + 1 if fills else 0
        return fills

    def _fill_step(self, draft: PlanDraft, prompts: Iterable[Sequence], num_free_rows: int) -> bool:
        sequences = self._sequences
        if not self._is_on or sequences.num_queued > num_free_rows or sequences.may_come_back:
            return False
        # So nobody who runs lacks a page in this step, however its tokens are spread.
        if not self._pages.has_room(draft.budget, self._max_num_seqs):
            return False
        known = sum(sequence.num_uncomputed for sequence in prompts)
        return known + self._num_waiting_tokens(num_free_rows) >= draft.budget

    def newcomers_wait(self, draft: PlanDraft, num_free_rows: int) -> bool:
        """Whether newcomers stay out of a step that has other work; counts, asked once a plan.

        Until they fill it, or all of them have rows, or as many rows as a step has were idle for a
        step since they wait: then company that ends no sooner would cost more than it gives.
        """
        if not self._is_on or not draft.work or len(self._sequences.waiting) <= num_free_rows:
            return False
        self._num_idle += num_free_rows
        is_short_wait = self._num_idle < self._max_num_seqs
        return is_short_wait and self._num_waiting_tokens(num_free_rows) < draft.budget

    def newcomer_started(self) -> None:
        """Whoever waits now begins to wait; until one starts, for want of pages, nobody does."""
        self._num_idle = 0

    def _num_waiting_tokens(self, num_free_rows: int) -> int:
        """Prompt tokens of the oldest: those that start first under fcfs, else about as many."""
        first = self._sequences.waiting.oldest_ones(num_free_rows)
        return sum(sequence.num_uncomputed for sequence in first)

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

    def decodes_wait(
        self, draft: PlanDraft, prompts: Iterable[Sequence], num_free_rows: int
    ) -> bool:
        """Whether `prompts`, which run, and those that wait fill a step that is still empty.

        Never where somebody waits for a row or for pages: only decodes free them. A guess, as
        prefixes may be cached: what such a step has left is for the decodes.
        """
        sequences = self._sequences
        if not self._is_on or sequences.num_queued > num_free_rows or sequences.may_come_back:
            return False
        # So nobody who runs lacks a page in this step, however its tokens are spread.
        if not self._pages.has_room(draft.budget, self._max_num_seqs):
            return False
        known = sum(sequence.num_uncomputed for sequence in prompts)
        return known + self._num_waiting_tokens(num_free_rows) >= draft.budget

    def newcomers_wait(self, draft: PlanDraft, num_free_rows: int) -> bool:
        """Whether newcomers stay out of a step that has other work; asked once a plan.

        Until they fill it, or all of them have rows, or as many rows as a step has were idle for a
        step since they wait: then company that ends no sooner would cost more than it gives.
        """
        if not self._is_on:
            return False
        if draft.work and len(self._sequences.waiting) > num_free_rows:
            self._num_idle += num_free_rows
            is_short_wait = self._num_idle < self._max_num_seqs
            if is_short_wait and self._num_waiting_tokens(num_free_rows) < draft.budget:
                return True
        self._num_idle = 0
        return False

    def _num_waiting_tokens(self, num_free_rows: int) -> int:
        """Of those that the free rows are for under the policy fcfs; under others about as many."""
        first = self._sequences.waiting.oldest_ones(num_free_rows)
        return sum(sequence.num_uncomputed for sequence in first)

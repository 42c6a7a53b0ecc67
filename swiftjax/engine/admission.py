"""Who joins a step: those that were preempted, then choices that fork, then newcomers.

Within each the first that does not fit stops the rest, so nobody large is overtaken for ever. Finds
pages and gives rows; what is computed of a sequence is for the caller to plan, the scheduler.
"""

import math
from collections.abc import Iterable, Iterator

from swiftjax.config import SchedulerConfig
from swiftjax.engine.admission_gate import AdmissionGate
from swiftjax.engine.plan import PlanDraft
from swiftjax.engine.prompt_groups import PromptGroups
from swiftjax.engine.sequence import Sequence
from swiftjax.engine.sequence_pages import SequencePages
from swiftjax.engine.sequence_table import SequenceTable
from swiftjax.engine.served_tokens import Served


class Admission:
    """Finds sequences that may run, and their pages, for one scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        sequences: SequenceTable,
        pages: SequencePages,
        served: Served,
    ) -> None:
        self._sequences = sequences
        self._pages = pages
        self._served = served
        self._gate = AdmissionGate(sequences.waiting, config.min_batch_size, config.max_wait)
        self._groups = PromptGroups(config, sequences, pages)
        self._max_num_seqs = config.max_num_seqs

    @property
    def num_free_rows(self) -> int:
        """Sequences that may run besides those that do."""
        return self._max_num_seqs - len(self._sequences.running)

    def opens_at(self) -> float:
        """From when on a newcomer may start: -inf at once, +inf while none waits."""
        return self._gate.opens_at(self.num_free_rows)

    def decodes_wait(self, draft: PlanDraft, prompts: Iterable[Sequence], now: float) -> bool:
        """Whether decodes come last in this step, after `prompts`, which run, and who joins."""
        is_gate_shut = now < self.opens_at() < math.inf
        return not is_gate_shut and self._groups.decodes_wait(draft, prompts, self.num_free_rows)

    def admit(self, draft: PlanDraft, now: float) -> Iterator[Sequence]:
        """Give each sequence that joins its pages and a row, one at a time.

        The caller plans the tokens of each before it asks for the next, who gets what is left.
        """
        for sequence in self._find(draft, now):
            self._sequences.run(sequence)
            draft.admitted.append(sequence)
            yield sequence

    def _find(self, draft: PlanDraft, now: float) -> Iterator[Sequence]:
        yield from self._comebacks(draft)
        if self._sequences.may_come_back:
            return
        yield from self._forks(draft)
        if self._sequences.forks.next(draft) is not None:
            return
        num_free = self.num_free_rows
        if self._gate.is_open(now, num_free) and not self._groups.newcomers_wait(draft, num_free):
            for sequence in self._newcomers(draft):
                self._groups.newcomer_started()
                yield sequence

    def _has_room(self, draft: PlanDraft) -> bool:
        return draft.budget > 0 and self.num_free_rows > 0

    def _comebacks(self, draft: PlanDraft) -> Iterator[Sequence]:
        for sequence in self._sequences.comebacks():
            if not self._has_room(draft):
                return
            if sequence.state == "swapped":
                came_back = self._pages.swap_in(draft, sequence)
            else:
                came_back = self._pages.start(draft, sequence)
            if not came_back:
                return
            yield sequence

    def _forks(self, draft: PlanDraft) -> Iterator[Sequence]:
        while (pair := self._sequences.forks.next(draft)) is not None:
            source, fork = pair
            if not self._has_room(draft) or not self._pages.fork(draft, source, fork):
                return
            yield fork

    def _newcomers(self, draft: PlanDraft) -> Iterator[Sequence]:
        while self._has_room(draft):
            sequence = self._sequences.waiting.peek()
            if sequence is None or not self._pages.start(draft, sequence):
                return
            self._served.start(sequence.request.options.client_id)
            yield sequence

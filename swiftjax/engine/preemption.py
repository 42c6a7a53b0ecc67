"""Who gives up its pages when they run out, and how: swapped to host memory, or computed again.

The victim is for a policy to name. How is decided by measured speeds: the cheaper way, recompute
where the host has no room. Called by the scheduler.
"""

from dataclasses import dataclass

from swiftjax.engine.plan import PlanDraft
from swiftjax.engine.policies import VictimPolicy
from swiftjax.engine.sequence import Sequence
from swiftjax.engine.sequence_pages import SequencePages
from swiftjax.engine.sequence_table import SequenceTable


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionCosts:
    """Measured speeds and the room on the host. All zeros: always recompute."""

    host_pages: int = 0
    seconds_per_page: float = 0.0  # one way, between device and host
    seconds_per_token: float = 0.0  # to compute a prompt token again

    def prefers_swap(self, num_pages: int, num_tokens: int, host_pages_used: int) -> bool:
        """Whether moving out and back is cheaper than computing again, and there is room."""
        if host_pages_used + num_pages > self.host_pages:
            return False
        return 2 * num_pages * self.seconds_per_page < num_tokens * self.seconds_per_token


class Preemption:
    """Finds pages for running sequences, at the cost of others if need be.

    Nobody is preempted while a step is in flight, since its tokens are not known yet: then somebody
    is noted to be `due`, and the next plan has to wait until that step was read.
    """

    def __init__(
        self,
        sequences: SequenceTable,
        pages: SequencePages,
        choose_victim: VictimPolicy,
        costs: PreemptionCosts,
    ) -> None:
        self.costs = costs
        self.choose_victim = choose_victim
        self.num_preemptions = 0
        self._sequences = sequences
        self._pages = pages
        self._is_asked = False
        self._lacks_pages = False  # a running sequence did while a step was in flight

    def preempt_next(self) -> None:
        """Preempt one sequence in the next plan, though pages are not short; for tests.

        Does nothing while only one runs, so that somebody always gets on.
        """
        self._is_asked = True

    @property
    def is_due(self) -> bool:
        """Whether the next plan preempts somebody, as far as is known."""
        return self._lacks_pages or self._is_asked or bool(self._sequences.paused_running())

    def carry_out(self, draft: PlanDraft) -> None:
        """Preempt the paused, and one more where that was asked."""
        for sequence in self._sequences.paused_running():
            # Not swapped: that is for those who are back soon, and there may be no step to do it.
            self._preempt(draft, sequence, may_swap=False)
        if self._is_asked and len(self._sequences.running) > 1:
            self._give_way(draft, self.choose_victim(list(self._sequences.running.values())))
        self._is_asked = self._lacks_pages = False

    def take_pages(self, draft: PlanDraft, sequence: Sequence, count: int) -> bool:
        """Give a running sequence `count` more pages; False if it must wait."""
        while (pages := self._pages.allocate(count)) is None:
            # Decodes that come last lack pages after others joined: nobody leaves in such a plan.
            if draft.in_flight or draft.admitted:
                self._lacks_pages = draft.is_short = True
                return False
            running = self._sequences.running.values()
            victim = self.choose_victim([s for s in running if not draft.is_planned(s)])
            if victim is sequence and draft.work:
                return False  # the others get on, so it may keep what it has and wait a step
            self._give_way(draft, victim)
            if victim is sequence:
                return False
        sequence.page_ids += pages
        return True

    def _give_way(self, draft: PlanDraft, victim: Sequence) -> None:
        draft.is_short = True
        self._preempt(draft, victim)

    def _preempt(self, draft: PlanDraft, sequence: Sequence, *, may_swap: bool = True) -> None:
        self.num_preemptions += 1
        num_pages, num_on_host = len(sequence.page_ids), self._pages.num_on_host
        may_swap &= not sequence.request.session  # whose pages are kept, here or in a copy
        if swaps := may_swap and self.costs.prefers_swap(
            num_pages, sequence.computed_len, num_on_host
        ):
            self._pages.swap_out(draft, sequence)
        self._sequences.preempt(sequence, swapped=swaps)

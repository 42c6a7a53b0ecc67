"""What one step does, as plain data: page moves first, then the work in the order of its rows.

A `PlanDraft` is filled by the scheduler and its parts; the finished `Plan` is all that batching,
the runner and observers see of a step. Here a prompt is cut to the sizes that steps are padded to.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from swiftjax.batch import PageCopy, PageMove, PageMoves
from swiftjax.engine.sequence import Sequence


class Work(NamedTuple):
    """One sequence's share of a step: compute `num_new` tokens from position `start` on."""

    sequence: Sequence
    start: int
    num_new: int
    samples: bool  # False in the middle of a prompt


class Plan(NamedTuple):
    """One step."""

    work: tuple[Work, ...]
    admitted: tuple[Sequence, ...]  # sequences that took a row for this step
    moves: PageMoves


# What a step costs beside its tokens, in tokens: reading the weights once.
FIXED_COST = 256


class PlanDraft:
    """A plan while the scheduler fills it; `budget` is what is left of the step's tokens."""

    def __init__(
        self, budget: int, *, step_sizes: SequenceOf[int] = (), in_flight: bool = False
    ) -> None:
        """Steps are padded to `step_sizes` tokens, ascending; none means they are not."""
        self.budget = budget
        self.num_tokens = 0
        self._step_sizes = step_sizes
        self.in_flight = in_flight  # whether the step before is still to be read
        self.is_short = False  # of pages: somebody gave way in this plan, or waits until others do
        self.work: list[Work] = []
        self.admitted: list[Sequence] = []
        self.out: list[PageMove] = []
        self.back: list[PageMove] = []
        self.copies: list[PageCopy] = []
        self._starts: dict[int, int] = {}  # by the order of the planned sequences

    def add(self, sequence: Sequence, num_new: int, *, samples: bool) -> None:
        """Compute the next `num_new` tokens of a sequence, and sample if that is all of them."""
        start = sequence.computed_len
        sequence.computed_len = start + num_new
        sequence.num_unread += samples
        self.work.append(Work(sequence, start, num_new, samples))
        self._starts[sequence.order] = start
        self.budget -= num_new
        self.num_tokens += num_new

    def worth_computing(self, wanted: int) -> int:
        """How many of a prompt's `wanted` tokens to put at the end of this step, one at least.

        All, or as many as fill the padded step below: the rest goes on in the next step, and costs
        less there than padding would here. Where nobody else is in this step, the next one may be
        for the rest alone.
        """
        total = self.num_tokens + min(wanted, self.budget)
        below = max((size for size in self._step_sizes if size <= total), default=0)
        above = min((size for size in self._step_sizes if size >= total), default=0)
        rest = cost = total - below
        if not self.work:
            cost = FIXED_COST + min((s for s in self._step_sizes if s >= rest), default=rest)
        is_cheaper = self.num_tokens < below and cost < above - below
        return below - self.num_tokens if is_cheaper else wanted

    def is_planned(self, sequence: Sequence) -> bool:
        """Whether the sequence has work in this plan, so that its pages are spoken for."""
        return sequence.order in self._starts

    def computed_before(self, sequence: Sequence) -> int:
        """Tokens that are in the sequence's pages before the step; 0 if only this step runs it."""
        if sequence in self.admitted:
            return 0
        return self._starts.get(sequence.order, sequence.computed_len)

    def finish(self, out: SequenceOf[PageMove] = (), drop: SequenceOf[str] = ()) -> Plan:
        """The finished plan; `out` are pages that leave before its own."""
        out, back = (*out, *self.out), tuple(self.back)
        moves = PageMoves(out, back, tuple(self.copies), tuple(drop))
        return Plan(tuple(self.work), tuple(self.admitted), moves)

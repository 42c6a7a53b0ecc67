"""What one step does, as plain data: page moves first, then the work in the order of its rows."""

from typing import NamedTuple

from swiftjax.batch import PageMove, PageMoves
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


class PlanDraft:
    """A plan while the scheduler fills it; `budget` is what is left of the step's tokens."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.work: list[Work] = []
        self.admitted: list[Sequence] = []
        self.out: list[PageMove] = []
        self.back: list[PageMove] = []
        self._planned: set[int] = set()

    def add(self, sequence: Sequence, num_new: int) -> None:
        """Compute the next `num_new` tokens of a sequence."""
        start = sequence.computed_len
        sequence.computed_len = end = start + num_new
        self.work.append(Work(sequence, start, num_new, end == len(sequence.token_ids)))
        self._planned.add(sequence.order)
        self.budget -= num_new

    def is_planned(self, sequence: Sequence) -> bool:
        """Whether the sequence has work in this plan, so that its pages are spoken for."""
        return sequence.order in self._planned

    def finish(self, drop: list[str]) -> Plan:
        """The finished plan."""
        moves = PageMoves(tuple(self.out), tuple(self.back), tuple(drop))
        return Plan(tuple(self.work), tuple(self.admitted), moves)

"""The choices of one request: one of them computes the prompt, the others fork from its pages.

A fork owns the full pages of the prompt together with its source and gets a copy of the page that
holds the last prompt token, which it computes itself: its own first draw needs those scores.
Decides who may fork from whom. Called by `SequenceTable`, which owns rows and states, and asked by
`Admission`.
"""

from swiftjax.engine.plan import PlanDraft
from swiftjax.engine.sequence import Sequence


class Family:
    """Choices that are waiting, running or preempted, and those that wait to be forked.

    While one waits to be forked there is a member to fork from, now or later.
    """

    __slots__ = ("forking", "members")

    def __init__(self, first: Sequence) -> None:
        self.members = [first]
        self.forking: list[Sequence] = []

    def source(self, draft: PlanDraft) -> Sequence | None:
        """A running member whose prompt but the last token was in the cache before this step."""
        for member in self.members:
            known = draft.computed_before(member)
            if member.state == "running" and known >= member.prompt_len - 1:
                return member
        return None


class ForkTable:
    """The families of all requests with several choices that have not ended."""

    def __init__(self) -> None:
        self._families: dict[int, Family] = {}  # by the order of each of their sequences
        self._started: dict[Family, None] = {}  # with somebody to fork, and somebody who ran
        self.num_forking = 0

    def __len__(self) -> int:
        """Sequences that belong to a family."""
        return len(self._families)

    def add(self, sequence: Sequence, leader: Sequence) -> None:
        """Take a choice that is to be forked from what `leader`, another one, computes."""
        family = self._families.setdefault(leader.order, Family(leader))
        family.forking.append(sequence)
        self._families[sequence.order] = family
        self.num_forking += 1

    def start(self, sequence: Sequence) -> None:
        """Note that a sequence has begun to run."""
        family = self._families.get(sequence.order)
        if family is not None and family.forking:
            self._started[family] = None

    def next(self, draft: PlanDraft) -> tuple[Sequence, Sequence] | None:
        """Who can be forked now: (source, fork). The caller starts the fork or asks no more."""
        for family in self._started:
            source = family.source(draft)
            if source is not None:
                return source, family.forking[0]
        return None

    def forked(self, sequence: Sequence) -> None:
        """Note that a sequence waits no more to be forked."""
        family = self._families[sequence.order]
        family.forking.remove(sequence)
        family.members.append(sequence)
        self.num_forking -= 1
        if not family.forking:
            self._started.pop(family, None)

    def leave(self, sequence: Sequence) -> Sequence | None:
        """Forget a sequence that ends; returns the one that has to take its place, if any."""
        family = self._families.get(sequence.order)
        if family is None:
            return None
        if sequence.state == "forking":
            self.forked(sequence)
        del self._families[sequence.order]
        family.members.remove(sequence)
        if family.members or not family.forking:
            return None
        heir = family.forking[0]
        self.forked(heir)
        return heir

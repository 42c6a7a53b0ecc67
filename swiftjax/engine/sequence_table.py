"""Every open sequence by its state, and the moves between states that docs/scheduler.md draws.

Who runs has a row and pages; a move to or from running takes or returns both. When somebody moves,
and why, is for the callers to decide: `Scheduler`, `Admission` and `Preemption`.
"""

from swiftjax.engine.forking import ForkTable
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.rows import RowTable
from swiftjax.engine.sequence import Sequence
from swiftjax.engine.sequence_pages import SequencePages
from swiftjax.engine.waiting_queue import WaitingQueue


class SequenceTable:
    """Where each sequence stands from its submission to its end."""

    def __init__(self, waiting: WaitingQueue, rows: RowTable, pages: SequencePages) -> None:
        self.by_id: dict[str, Sequence] = {}
        self.waiting = waiting
        self.forks = ForkTable()
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.preempted: dict[str, Sequence] = {}
        self.paused: dict[str, None] = {}  # preempted, or to be preempted by the next plan
        self._heirs: list[Sequence] = []  # took a row since the last step
        self._rows = rows
        self._pages = pages

    @property
    def num_queued(self) -> int:
        """Sequences that never ran."""
        return len(self.waiting) + self.forks.num_forking

    @property
    def may_come_back(self) -> bool:
        """Whether somebody is preempted and not paused."""
        return not self.preempted.keys() <= self.paused.keys()

    def decodes_and_prompts(self) -> tuple[list[Sequence], list[Sequence]]:
        """Those that run with one token to compute at most, and those with more."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running.values():
            (prompts if sequence.num_uncomputed > 1 else decodes).append(sequence)
        return decodes, prompts

    def comebacks(self) -> list[Sequence]:
        """The preempted that are not paused, the oldest first."""
        sequences = (s for name, s in self.preempted.items() if name not in self.paused)
        return sorted(sequences, key=lambda sequence: sequence.order)

    def paused_running(self) -> list[Sequence]:
        """The paused that still have rows and pages."""
        return [self.running[name] for name in self.paused if name in self.running]

    def take_heirs(self) -> list[Sequence]:
        """Those that took a row outside a plan and still run, told once."""
        heirs, self._heirs = self._heirs, []
        return [heir for heir in heirs if heir.state == "running"]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, or let it wait for the pages of the one it is a fork of."""
        leader = self.by_id.get(sequence.request.fork_of or "")
        self.by_id[sequence.request.request_id] = sequence
        if leader is None:
            self.waiting.push(sequence)
        else:
            sequence.state = "forking"
            self.forks.add(sequence, leader)

    def run(self, sequence: Sequence) -> None:
        """Give a row to a sequence that has got its pages."""
        self._leave(sequence)
        self._take_row(sequence)

    def preempt(self, sequence: Sequence, *, swapped: bool) -> None:
        """Take row and pages from a running sequence; if not `swapped`, it is computed again."""
        sequence.state = "swapped" if swapped else "preempted"
        self._stop_running(sequence)
        if not swapped:
            sequence.computed_len = sequence.num_dropped = 0
        self.preempted[sequence.request.request_id] = sequence

    def pause(self, request_id: str) -> None:
        """Let nobody start or go on with a request; an unknown id is ignored.

        One that runs keeps its row until somebody preempts it.
        """
        sequence = self.by_id.get(request_id)
        if sequence is None:
            return
        self.paused[request_id] = None
        if sequence.state == "waiting":
            self.waiting.remove(sequence)
            self._wait_preempted(sequence)

    def resume(self, request_id: str) -> None:
        """Let a paused request come back like a preempted one; any other is ignored."""
        self.paused.pop(request_id, None)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it stands; the heir of its prompt takes its place."""
        heir = self.forks.leave(sequence)
        if heir is not None:
            self._inherit(sequence, heir)
        elif sequence.state == "running":
            self._stop_running(sequence)
        elif sequence.state != "forking":
            self._leave(sequence)
        if sequence.state == "swapped":
            self._pages.drop_copy(sequence)
        sequence.state = "finished"
        self.paused.pop(sequence.request.request_id, None)
        del self.by_id[sequence.request.request_id]

    def check_integrity(self, pool: PagePool) -> None:
        """Assert that states, rows and pages agree."""
        running, preempted = self.running.values(), self.preempted.values()
        owned = [page for s in running for page in s.page_ids]
        pool.check_integrity([*owned, *self._pages.owned_pages()])
        for sequence in running:
            assert sequence.state == "running" and sequence.row >= 0
            num_pages = len(sequence.page_ids)
            assert num_pages <= sequence.max_pages
            assert num_pages + sequence.num_dropped == pool.pages_for(sequence.computed_len)
        assert len({s.row for s in running}) == len(running)
        for sequence in preempted:
            assert sequence.state in ("swapped", "preempted") and not sequence.page_ids
        assert sum(s.num_swapped for s in preempted) == self._pages.num_on_host
        assert self.paused.keys() <= self.by_id.keys()
        assert len(self.by_id) == len(running) + len(preempted) + self.num_queued
        assert self.forks.num_forking <= len(self.forks) <= len(self.by_id)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence that does not run out of where it waits."""
        if sequence.state == "waiting":
            self.waiting.remove(sequence)
        elif sequence.state == "forking":
            self.forks.forked(sequence)
        else:
            del self.preempted[sequence.request.request_id]

    def _inherit(self, sequence: Sequence, heir: Sequence) -> None:
        """Put a fork in the place of the last choice that could hand its prompt's pages on."""
        if sequence.state == "running":
            self._pages.leave_prompt(sequence, heir)
            self._stop_running(sequence)
            self._take_row(heir)
            self._heirs.append(heir)
        elif sequence.state == "waiting":
            self._leave(sequence)
            heir.state = "waiting"
            self.waiting.push(heir)
        else:
            self._leave(sequence)
            self._wait_preempted(heir)

    def _wait_preempted(self, sequence: Sequence) -> None:
        sequence.state = "preempted"
        self.preempted[sequence.request.request_id] = sequence

    def _take_row(self, sequence: Sequence) -> None:
        sequence.state = "running"
        self.running[sequence.request.request_id] = sequence
        self.forks.start(sequence)
        self._rows.admit(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        del self.running[sequence.request.request_id]
        self._rows.release(sequence)
        self._pages.release(sequence)

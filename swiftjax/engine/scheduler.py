"""Decides what the next step computes. Host only: plain Python, no arrays, no clock of its own.

Rules: first come, first served. A step holds every running decode plus as much prefill as the
token budget leaves, so a long prompt never stalls the others. A request is admitted when the pages
for its longest possible answer can be promised to it; what runs therefore always finishes, and
nothing is ever preempted. Same calls, same plans.
"""

from collections import deque
from typing import NamedTuple

from swiftjax.batch import Sampled
from swiftjax.config import SchedulerConfig
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.request import FinishReason, Request, StepOutput
from swiftjax.engine.rows import RowTable
from swiftjax.engine.sequence import Sequence
from swiftjax.errors import InvalidRequestError, QueueFullError


class Work(NamedTuple):
    """One sequence's share of a step: compute `num_new` tokens from position `start` on."""

    sequence: Sequence
    start: int
    num_new: int
    samples: bool  # False in the middle of a prompt


class Plan(NamedTuple):
    """One step, in the order of its rows."""

    work: tuple[Work, ...]
    admitted: tuple[Sequence, ...]  # sequences that took a row for this step


class Scheduler:
    """Holds every sequence from submit to finish."""

    def __init__(self, config: SchedulerConfig, pool: PagePool, rows: RowTable) -> None:
        self.config = config
        self.pool = pool
        self.rows = rows
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._ended: list[StepOutput] = []
        self._promised = 0  # pages promised to running sequences and not yet taken

    @property
    def num_running(self) -> int:
        """Sequences that own pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not yet admitted."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""
        return bool(self._running or self._waiting or self._ended)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises InvalidRequestError if it can never fit or its id is in use, and QueueFullError if
        too many requests wait.
        """
        if request.request_id in self._by_id:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use")
        sequence = Sequence(request)
        capacity = self.pool.num_pages * self.pool.page_size
        if sequence.max_cached_len > capacity:
            raise InvalidRequestError(
                f"prompt ({sequence.prompt_len}) + max_new_tokens ({request.max_new_tokens}) needs "
                f"{sequence.max_cached_len} KV slots; the cache has {capacity} in all. At most "
                f"{capacity + 1 - sequence.prompt_len} new tokens fit; raise max_total_token_num"
            )
        if len(self._waiting) >= self.config.max_queue_len:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting (max_queue_len); try again later"
            )
        self._by_id[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request wherever it stands and free its pages; an unknown id is ignored."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return
        if sequence.state == "waiting":
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
        self._finish(sequence)
        self._ended.append(StepOutput(request_id, (), (), reason))

    def schedule(self, now: float) -> Plan:
        """Plan the next step and take its pages; `now` is compared with the deadlines."""
        self._expire(now)
        budget = self.config.max_num_batched_tokens
        work: list[Work] = []
        # Decodes first: each is one token, and they are what running users wait for.
        for sequence in sorted(self._running, key=lambda s: s.num_uncomputed > 1):
            budget -= self._add(work, sequence, budget)
        num_before = len(self._running)
        while budget > 0 and self._waiting and self._admit(self._waiting[0]):
            budget -= self._add(work, self._running[-1], budget)
        return Plan(tuple(work), tuple(self._running[num_before:]))

    def update(self, plan: Plan, sampled: Sampled) -> list[StepOutput]:
        """Append the sampled tokens, finish what is done, and return what there is to tell."""
        outputs = self.take_ended()
        rows = zip(sampled.token_ids, sampled.logprobs, strict=True)
        for sequence in (w.sequence for w in plan.work if w.samples):
            token_id, logprob = next(rows)
            sequence.token_ids.append(token_id)
            reason = sequence.finish_reason()
            request_id = sequence.request.request_id
            outputs.append(StepOutput(request_id, (token_id,), (logprob,), reason))
            if reason is not None:
                self._running.remove(sequence)
                self._finish(sequence)
        return outputs

    def take_ended(self) -> list[StepOutput]:
        """Final outputs of requests that ended outside a step (abort, deadline), told once."""
        ended, self._ended = self._ended, []
        return ended

    def check_integrity(self) -> None:
        """Assert that pages, promises and states agree; for tests and idle moments."""
        self.pool.check_integrity()
        held = [page for sequence in self._running for page in sequence.page_ids]
        assert len(held) == len(set(held)) == self.pool.num_pages - self.pool.num_free
        needs = [self.pool.pages_for(s.max_cached_len) - len(s.page_ids) for s in self._running]
        assert sum(needs) == self._promised <= self.pool.num_free
        assert all(not s.page_ids for s in self._waiting)
        assert len(self._by_id) == len(self._running) + len(self._waiting)

    def _expire(self, now: float) -> None:
        late = [
            request_id
            for request_id, sequence in self._by_id.items()
            if sequence.request.deadline is not None and sequence.request.deadline <= now
        ]
        for request_id in late:
            self.abort(request_id, "time_limit")

    def _admit(self, sequence: Sequence) -> bool:
        need = self.pool.pages_for(sequence.max_cached_len)
        full = len(self._running) >= self.config.max_num_seqs
        if full or need > self.pool.num_free - self._promised:
            return False
        self._promised += need
        self._waiting.popleft()
        sequence.state = "running"
        self.rows.admit(sequence)
        self._running.append(sequence)
        return True

    def _add(self, work: list[Work], sequence: Sequence, budget: int) -> int:
        """Plan up to `budget` tokens of a sequence; returns how many."""
        num_new = min(sequence.num_uncomputed, budget)
        if num_new <= 0:
            return 0
        end = sequence.computed_len + num_new
        missing = self.pool.pages_for(end) - len(sequence.page_ids)
        pages = self.pool.allocate(missing)
        assert pages is not None, "a promised page was not there"
        self._promised -= missing
        sequence.page_ids += pages
        self.rows.set_pages(sequence, len(sequence.page_ids) - missing)
        work.append(Work(sequence, sequence.computed_len, num_new, end == sequence.total_len))
        sequence.computed_len = end
        return num_new

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state == "running":
            need = self.pool.pages_for(sequence.max_cached_len)
            self._promised -= need - len(sequence.page_ids)
            self.rows.release(sequence)
        self.pool.release(sequence.page_ids)
        sequence.page_ids = []
        sequence.state = "finished"
        del self._by_id[sequence.request.request_id]

"""Decides what the next step computes. Host only: plain Python, no arrays, no clock of its own.

A step holds every running decode plus as much prefill as the token budget leaves, so a long prompt
never stalls the others. New requests start in the order of the queue policy, but only while nobody
who was preempted waits to come back. When a running sequence lacks a page, a victim gives its own
up. Same calls, same plans. The rules are drawn in docs/scheduler.md.
"""

import math
from collections.abc import Callable

from swiftjax.batch import Sampled
from swiftjax.config import SchedulerConfig
from swiftjax.engine.admission_gate import AdmissionGate
from swiftjax.engine.deadlines import Deadlines
from swiftjax.engine.forking import ForkTable
from swiftjax.engine.kept_pages import NOTHING_KEPT, KeptLimits, KeptPages
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.plan import Plan, PlanDraft
from swiftjax.engine.policies import VICTIM_POLICIES, PolicyState, find_queue_policy
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.prefix_cache import PageKeys
from swiftjax.engine.request import FinishReason, Request, StepOutput
from swiftjax.engine.results import make_output, take_prompt_scores
from swiftjax.engine.rows import RowTable
from swiftjax.engine.sequence import Sequence
from swiftjax.engine.sequence_pages import SequencePages
from swiftjax.engine.served_tokens import ServedTokens
from swiftjax.engine.stream_pages import drop_expired, limit_pages
from swiftjax.engine.waiting_queue import WaitingQueue
from swiftjax.errors import InvalidRequestError, QueueFullError


class Scheduler:
    """Holds every sequence from submit to finish."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        rows: RowTable,
        *,
        costs: PreemptionCosts | None = None,
        salt: Callable[[Request], str] = lambda request: request.options.cache_salt,
        model_version: str = "",
        kept: KeptLimits = NOTHING_KEPT,
    ) -> None:
        """`salt` names what cached keys and values depend on besides the tokens of a request."""
        self.config = config
        self.pool = pool
        self.rows = rows
        self.costs = costs or PreemptionCosts()
        self.num_preemptions = 0
        self._served = ServedTokens()
        state = PolicyState(served_tokens=self._served.tokens)
        self._waiting = WaitingQueue(find_queue_policy(config.policy), state)
        self._gate = AdmissionGate(self._waiting, config.min_batch_size, config.max_wait)
        self._victim = VICTIM_POLICIES[config.victim_policy]
        keys = PageKeys(pool.page_size, model_version)
        self.kept = KeptPages(pool, kept)
        self._pages = SequencePages(pool, keys, self.kept, salt, uses_cache=config.prefix_cache)
        self._by_id: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}  # in the order of admission
        self._preempted: dict[str, Sequence] = {}
        self._paused: dict[str, None] = {}
        self._forks = ForkTable()
        self._heirs: list[Sequence] = []  # took a row since the last step
        self._deadlines = Deadlines()
        self._ended: list[StepOutput] = []
        self._num_submitted = 0
        self._preempt_asked = False
        self._must_read = False  # a running sequence lacked pages while a step was in flight

    @property
    def num_running(self) -> int:
        """Sequences that own pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that own no pages: not yet admitted, or preempted."""
        return self._num_queued + len(self._preempted)

    @property
    def _num_queued(self) -> int:
        return len(self._waiting) + self._forks.num_forking

    @property
    def num_preempted(self) -> int:
        """Sequences among the waiting that ran before."""
        return len(self._preempted)

    @property
    def _num_free_rows(self) -> int:
        return self.config.max_num_seqs - len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether anything is left to compute or report, now or later (`next_work_time`)."""
        return bool(self._by_id or self._ended)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this id waits, runs or is preempted."""
        return request_id in self._by_id

    def submit(self, request: Request) -> None:
        """Queue a request, or let it wait for the pages of the one it is a fork of.

        Raises InvalidRequestError if it can never fit or its id is in use, and QueueFullError if
        too many requests wait.
        """
        if request.request_id in self:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use")
        sequence = Sequence(request, self._num_submitted)
        sequence.max_pages = limit_pages(sequence, self.pool, self.rows)
        capacity = self.pool.num_pages * self.pool.page_size
        if sequence.max_pages > self.pool.num_pages:
            raise InvalidRequestError(
                f"prompt ({sequence.prompt_len}) + max_new_tokens ({request.max_new_tokens}) needs "
                f"{sequence.max_cached_len} KV slots; the cache has {capacity} in all. At most "
                f"{capacity + 1 - sequence.prompt_len} new tokens fit; raise max_total_token_num"
            )
        if self._num_queued >= self.config.max_queue_len:
            raise QueueFullError(
                f"{self._num_queued} requests are waiting (max_queue_len); try again later"
            )
        self._num_submitted += 1
        leader = self._by_id.get(request.fork_of or "")
        self._by_id[request.request_id] = sequence
        self._served.join(request.options.client_id)
        if leader is None:
            self._waiting.push(sequence)
        else:
            sequence.state = "forking"
            self._forks.add(sequence, leader)
        if request.deadline is not None:
            self._deadlines.add(request.request_id, request.deadline)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request wherever it stands and free its pages; an unknown id is ignored."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence)
            self._ended.append(StepOutput(request_id, (), (), reason))

    def pause(self, request_id: str) -> None:
        """Compute nothing for a request until `resume`; an unknown id is ignored.

        Its tokens are kept; its row and its pages are for others from the next plan on.
        """
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return
        self._paused[request_id] = None
        if sequence.state == "waiting":
            self._waiting.remove(sequence)
            sequence.state = "preempted"
            self._preempted[request_id] = sequence

    def resume(self, request_id: str) -> None:
        """Let a paused request come back like a preempted one; any other is ignored."""
        self._paused.pop(request_id, None)

    def next_work_time(self) -> float:
        """From when on `schedule` may have something to do or `take_ended` to tell.

        -inf at once; +inf not before the next call of submit, resume or abort.
        """
        may_come_back = not self._preempted.keys() <= self._paused.keys()
        if self._ended or self._running or may_come_back:
            return -math.inf
        return min(self._gate.opens_at(self._num_free_rows), self._deadlines.earliest())

    def preempt_next(self) -> None:
        """Preempt one sequence in the next plan, though pages are not short; for tests.

        Does nothing while only one runs, so that somebody always gets on.
        """
        self._preempt_asked = True

    def schedule(self, now: float, *, in_flight: bool = False) -> Plan:
        """Plan the next step and take its pages; `now` is compared with the deadlines.

        While a step is `in_flight`, its tokens are still unread and nobody is preempted: the plan
        is empty when that is needed, and the caller reads before it asks again.
        """
        self._expire(now)
        draft = PlanDraft(
            self.config.max_num_batched_tokens,
            step_sizes=self.config.step_sizes,
            in_flight=in_flight,
        )
        paused = [self._running[i] for i in self._paused if i in self._running]
        if in_flight and (self._must_read or self._preempt_asked or paused):
            return draft.finish()
        for sequence in paused:
            # Not swapped: that is for those who are back soon, and there may be no step to do it.
            self._preempt(draft, sequence, may_swap=False)
        num_preemptions, self._must_read = self.num_preemptions, False
        if self._preempt_asked and len(self._running) > 1:
            self._preempt(draft, self._victim(list(self._running.values())))
        self._preempt_asked = False
        self._plan_running(draft)
        # Whoever was just preempted, or waits for pages, must not lose them to a newcomer, nor
        # come straight back.
        if self.num_preemptions == num_preemptions and not self._must_read:
            self._plan_comebacks(draft)
            if self._preempted.keys() <= self._paused.keys() and self._plan_forks(draft):
                self._plan_newcomers(draft, now)
        return self._finish_draft(draft)

    def _finish_draft(self, draft: PlanDraft) -> Plan:
        if not draft.work:  # nobody will carry this plan out
            assert not (draft.out or draft.back or draft.copies), "page moves would be lost"
            return draft.finish()
        draft.admitted += [heir for heir in self._heirs if heir.state == "running"]
        self._heirs = []
        return draft.finish(*self._pages.take_moves())

    def update(self, plan: Plan, sampled: Sampled) -> list[StepOutput]:
        """Append the sampled tokens, finish what is done, and return what there is to tell."""
        outputs = self.take_ended()
        take_prompt_scores(plan, sampled)
        for row, sequence in enumerate(w.sequence for w in plan.work if w.samples):
            sequence.num_unread -= 1
            if sequence.state == "finished":  # while this step was under way
                continue
            sequence.token_ids.append(sampled.token_ids[row])
            reason = sequence.finish_reason()
            outputs.append(make_output(sequence, sampled, row, reason))
            if reason is not None:
                self._finish(sequence)
        return outputs

    def take_ended(self) -> list[StepOutput]:
        """Final outputs of requests that ended outside a step (abort, deadline), told once."""
        ended, self._ended = self._ended, []
        return ended

    def check_integrity(self) -> None:
        """Assert that pages, rows and states agree; for tests and idle moments."""
        running, preempted = self._running.values(), self._preempted.values()
        owned = [page for s in running for page in s.page_ids]
        self.pool.check_integrity([*owned, *self._pages.owned_pages()])
        for sequence in running:
            assert sequence.state == "running" and sequence.row >= 0
            num_pages = len(sequence.page_ids)
            assert num_pages <= sequence.max_pages
            num_pages += sequence.num_dropped
            assert num_pages == self.pool.pages_for(sequence.computed_len)
        assert len({s.row for s in running}) == len(running)
        for sequence in preempted:
            assert sequence.state in ("swapped", "preempted") and not sequence.page_ids
        assert sum(s.num_swapped for s in preempted) == self._pages.num_on_host
        assert self._pages.num_on_host <= self.costs.host_pages or not preempted
        assert self._paused.keys() <= self._by_id.keys()
        assert len(self._by_id) == len(running) + len(preempted) + self._num_queued
        assert self._forks.num_forking <= len(self._forks) <= len(self._by_id)

    def _expire(self, now: float) -> None:
        for request_id in self._deadlines.pop_due(now):
            self.abort(request_id, "time_limit")

    def _plan_running(self, draft: PlanDraft) -> None:
        """Decodes first: each is one token, and they are what running users wait for."""
        prompts = []
        for sequence in list(self._running.values()):
            if sequence.num_uncomputed > 1:
                prompts.append(sequence)
            elif sequence.state == "running":  # not made a victim further up
                self._add(draft, sequence)
        for sequence in prompts:
            if sequence.state == "running":
                self._add(draft, sequence)

    def _plan_comebacks(self, draft: PlanDraft) -> None:
        """Let the preempted come back, the oldest first; the first that does not fit stops."""
        for sequence in sorted(self._preempted.values(), key=lambda s: s.order):
            if sequence.request.request_id in self._paused:
                continue
            if draft.budget <= 0 or len(self._running) >= self.config.max_num_seqs:
                return
            if sequence.state == "swapped":
                came_back = self._pages.swap_in(draft, sequence)
            else:
                came_back = self._pages.start(draft, sequence)
            if not came_back:
                return
            del self._preempted[sequence.request.request_id]
            self._run(draft, sequence)

    def _plan_forks(self, draft: PlanDraft) -> bool:
        """Start choices from the pages of another; False if one of them has to wait for room."""
        while (pair := self._forks.next(draft)) is not None:
            if draft.budget <= 0 or len(self._running) >= self.config.max_num_seqs:
                return False
            source, fork = pair
            if not self._pages.fork(draft, source, fork):
                return False
            self._forks.forked(fork)
            self._run(draft, fork)
        return True

    def _plan_newcomers(self, draft: PlanDraft, now: float) -> None:
        if not self._gate.is_open(now, self._num_free_rows):
            return
        while draft.budget > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting.peek()
            if sequence is None or not self._pages.start(draft, sequence):
                return
            self._waiting.remove(sequence)
            self._served.start(sequence.request.options.client_id)
            self._run(draft, sequence)

    def _run(self, draft: PlanDraft, sequence: Sequence) -> None:
        """Let a sequence that has its pages take part in the step."""
        self._take_row(sequence)
        draft.admitted.append(sequence)
        self._add(draft, sequence)

    def _take_row(self, sequence: Sequence) -> None:
        sequence.state = "running"
        self._running[sequence.request.request_id] = sequence
        self._forks.start(sequence)
        self.rows.admit(sequence)

    def _add(self, draft: PlanDraft, sequence: Sequence) -> None:
        """Plan as many tokens of a running sequence as the budget and the pages allow."""
        total, page_size = sequence.total_len, self.pool.page_size
        if total >= sequence.full_len or (sequence.num_unread and sequence.rules is not None):
            return  # nothing is left to do, or what may follow hangs on a token not read yet
        if sequence.streaming is not None:
            drop_expired(sequence, sequence.streaming, self.pool, self.rows)
        start, dropped = sequence.computed_len, sequence.num_dropped
        wanted = total - start
        if wanted > 1 and not (self.num_waiting and self._num_free_rows):  # nobody follows
            wanted = draft.worth_computing(wanted)
        end = start + min(wanted, draft.budget)
        end = min(end, (sequence.max_pages + dropped) * page_size)
        if end <= start:
            return
        room = (len(sequence.page_ids) + dropped) * page_size
        if end > room and not self._take_pages(draft, sequence, end):
            return
        draft.add(sequence, end - start, samples=end == total)
        self._served.charge(sequence.request.options.client_id, end - start)
        if end >= (sequence.num_published + 1) * page_size:
            self._pages.publish(sequence)

    def _take_pages(self, draft: PlanDraft, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence pages for so many tokens, at the cost of others if need be.

        False if it must wait.
        """
        num_pages = self.pool.pages_for(num_tokens) - sequence.num_dropped
        count = num_pages - len(sequence.page_ids)
        while (pages := self._pages.allocate(count)) is None:
            if draft.in_flight:
                self._must_read = True
                return False
            candidates = [s for s in self._running.values() if not draft.is_planned(s)]
            victim = self._victim(candidates)
            if victim is sequence and draft.work:
                return False  # the others get on, so it may keep what it has and wait a step
            self._preempt(draft, victim)
            if victim is sequence:
                return False
        sequence.page_ids += pages
        self.rows.set_pages(sequence, len(sequence.page_ids) - count)
        return True

    def _preempt(self, draft: PlanDraft, sequence: Sequence, *, may_swap: bool = True) -> None:
        self.num_preemptions += 1
        num_pages, num_on_host = len(sequence.page_ids), self._pages.num_on_host
        may_swap &= not sequence.request.session  # whose pages are kept, here or in a copy
        if may_swap and self.costs.prefers_swap(num_pages, sequence.computed_len, num_on_host):
            self._pages.swap_out(draft, sequence)
            sequence.state = "swapped"
            self._stop_running(sequence)
        else:
            sequence.state = "preempted"
            self._stop_running(sequence)
            sequence.computed_len = sequence.num_dropped = 0
        self._preempted[sequence.request.request_id] = sequence

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[sequence.request.request_id]
        self.rows.release(sequence)
        self._pages.release(sequence)

    def _finish(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        heir = self._forks.leave(sequence)
        if sequence.state == "running":
            if heir is not None:
                self._pages.leave_prompt(sequence, heir)
            self._stop_running(sequence)
            if heir is not None:
                self._take_row(heir)
                self._heirs.append(heir)
        elif sequence.state == "waiting":
            self._waiting.remove(sequence)
            if heir is not None:
                heir.state = "waiting"
                self._waiting.push(heir)
        elif sequence.state != "forking":
            del self._preempted[request_id]
            if heir is not None:
                heir.state = "preempted"
                self._preempted[heir.request.request_id] = heir
        if sequence.state == "swapped":
            self._pages.drop_copy(sequence)
        sequence.state = "finished"
        self._paused.pop(request_id, None)
        self._deadlines.drop(request_id)
        self._served.leave(sequence.request.options.client_id)
        del self._by_id[request_id]

"""Decides what the next step computes. Host only: plain Python, no arrays, no clock of its own.

A step holds every running decode plus as much prefill as the token budget leaves, so a long prompt
never stalls the others, unless `group_prompts` asks for it. `Admission` says who joins,
`Preemption` who gives way when pages run out; `SequenceTable` knows where everybody stands. Same
calls, same plans. The rules are drawn in docs/scheduler.md.
"""

import math
from collections.abc import Callable

from swiftjax.batch import Sampled
from swiftjax.config import SchedulerConfig
from swiftjax.engine.admission import Admission
from swiftjax.engine.deadlines import Deadlines
from swiftjax.engine.kept_pages import NOTHING_KEPT, KeptLimits, KeptPages
from swiftjax.engine.page_limits import drop_expired, limit_pages
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.plan import Plan, PlanDraft
from swiftjax.engine.policies import VICTIM_POLICIES, PolicyState, find_queue_policy
from swiftjax.engine.preemption import Preemption, PreemptionCosts
from swiftjax.engine.prefix_cache import PageKeys
from swiftjax.engine.request import FinishReason, Request, StepOutput
from swiftjax.engine.results import make_output, take_prompt_scores
from swiftjax.engine.rows import RowTable
from swiftjax.engine.sequence import Sequence
from swiftjax.engine.sequence_pages import SequencePages
from swiftjax.engine.sequence_table import SequenceTable
from swiftjax.engine.served_tokens import Served
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
        self.kept = KeptPages(pool, kept)
        self.served = Served()
        self.deadlines = Deadlines()
        keys = PageKeys(pool.page_size, model_version)
        self._pages = SequencePages(pool, keys, self.kept, salt, uses_cache=config.prefix_cache)
        clients, owners = self.served.clients.tokens, self.served.owners.tokens
        state = PolicyState(served_tokens=clients, served_by_owner=owners)
        waiting = WaitingQueue(find_queue_policy(config.policy), state)
        self.sequences = SequenceTable(waiting, rows, self._pages)
        self._admission = Admission(config, self.sequences, self._pages, self.served)
        choose_victim, costs = VICTIM_POLICIES[config.victim_policy], costs or PreemptionCosts()
        self.preemption = Preemption(self.sequences, self._pages, choose_victim, costs)
        self._ended: list[StepOutput] = []
        self._num_submitted = 0

    @property
    def num_running(self) -> int:
        """Sequences that own pages."""
        return len(self.sequences.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that own no pages: not yet admitted, or preempted."""
        return self.sequences.num_queued + self.num_preempted

    @property
    def num_preempted(self) -> int:
        """Sequences among the waiting that ran before."""
        return len(self.sequences.preempted)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence gave its pages up, since the start."""
        return self.preemption.num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether anything is left to compute or report, now or later (`next_work_time`)."""
        return bool(self.sequences.by_id or self._ended)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this id waits, runs or is preempted."""
        return request_id in self.sequences.by_id

    def submit(self, request: Request) -> None:
        """Queue a request, or let it wait for the pages of the one it is a fork of.

        Raises InvalidRequestError if it can never fit or its id is in use, and QueueFullError if
        too many requests wait.
        """
        if request.request_id in self:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use")
        sequence = Sequence(request, self._num_submitted)
        sequence.max_pages = limit_pages(sequence, self.pool, self.rows)
        if self.sequences.num_queued >= self.config.max_queue_len:
            raise QueueFullError(
                f"{self.config.max_queue_len} requests are waiting (max_queue_len); try again later"
            )
        self._num_submitted += 1
        self.served.join(request.options.client_id)
        self.sequences.add(sequence)
        if request.deadline is not None:
            self.deadlines.add(request.request_id, request.deadline)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request wherever it stands and free its pages; an unknown id is ignored."""
        sequence = self.sequences.by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence)
            self._ended.append(StepOutput(request_id, (), (), reason))

    def pause(self, request_id: str) -> None:
        """Compute nothing for a request until `resume`; an unknown id is ignored.

        Its tokens are kept; its row and its pages are for others from the next plan on.
        """
        self.sequences.pause(request_id)

    def resume(self, request_id: str) -> None:
        """Let a paused request come back like a preempted one; any other is ignored."""
        self.sequences.resume(request_id)

    def next_work_time(self) -> float:
        """From when on `schedule` may have something to do or `take_ended` to tell.

        -inf at once; +inf not before the next call of submit, resume or abort.
        """
        if self._ended or self.sequences.running or self.sequences.may_come_back:
            return -math.inf
        return min(self._admission.opens_at(), self.deadlines.earliest())

    def schedule(self, now: float, *, in_flight: bool = False) -> Plan:
        """Plan the next step and take its pages; `now` is compared with the deadlines.

        While a step is `in_flight`, its tokens are still unread and nobody is preempted: the plan
        is empty when that is needed, and the caller reads before it asks again.
        """
        for request_id in self.deadlines.pop_due(now):
            self.abort(request_id, "time_limit")
        draft = PlanDraft(
            self.config.max_num_batched_tokens,
            step_sizes=self.config.step_sizes,
            in_flight=in_flight,
        )
        if in_flight and self.preemption.is_due:
            return draft.finish()
        self.preemption.carry_out(draft)
        decodes, prompts = self.sequences.decodes_and_prompts()
        # As a rule decodes come first: each is one token, and they are what running users wait for.
        decodes_wait = self._admission.decodes_wait(draft, prompts, now)
        self._plan_each(draft, prompts if decodes_wait else [*decodes, *prompts])
        # Whoever was just preempted, or waits for pages, must not lose them to a newcomer, nor
        # come straight back.
        if not draft.is_short:
            for sequence in self._admission.admit(draft, now):
                self._plan_tokens(draft, sequence)
        if decodes_wait:
            self._plan_each(draft, decodes)
        return self._finish_plan(draft)

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
        self.sequences.check_integrity(self.pool)
        has_room = self._pages.num_on_host <= self.preemption.costs.host_pages
        assert has_room or not self.num_preempted

    def _plan_each(self, draft: PlanDraft, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.state == "running":  # not made a victim further up
                self._plan_tokens(draft, sequence)

    def _plan_tokens(self, draft: PlanDraft, sequence: Sequence) -> None:
        """Plan as many tokens of a running sequence as the budget and the pages allow."""
        total, page_size = sequence.total_len, self.pool.page_size
        if total >= sequence.full_len or (sequence.num_unread and sequence.rules is not None):
            return  # nothing is left to do, or what may follow hangs on a token not read yet
        if sequence.streaming is not None:
            drop_expired(sequence, sequence.streaming, self.pool, self.rows)
        start, dropped = sequence.computed_len, sequence.num_dropped
        wanted = total - start
        if wanted > 1 and not (self.num_waiting and self._admission.num_free_rows):
            wanted = draft.worth_computing(wanted)  # no newcomer follows who could fill up the step
        end = start + min(wanted, draft.budget)
        end = min(end, (sequence.max_pages + dropped) * page_size)
        if end <= start:
            return
        room = (len(sequence.page_ids) + dropped) * page_size
        if end > room and not self._take_pages(draft, sequence, end):
            return
        draft.add(sequence, end - start, samples=end == total)
        self.served.charge(sequence.request.options.client_id, end - start)
        if end >= (sequence.num_published + 1) * page_size:
            self._pages.publish(sequence)

    def _take_pages(self, draft: PlanDraft, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence pages for so many tokens; False if it must wait."""
        num_own = len(sequence.page_ids)
        count = self.pool.pages_for(num_tokens) - sequence.num_dropped - num_own
        if not self.preemption.take_pages(draft, sequence, count):
            return False
        self.rows.set_pages(sequence, num_own)
        return True

    def _finish_plan(self, draft: PlanDraft) -> Plan:
        if not draft.work:  # nobody will carry this plan out
            assert not (draft.out or draft.back or draft.copies), "page moves would be lost"
            return draft.finish()
        draft.admitted += self.sequences.take_heirs()
        return draft.finish(*self._pages.take_moves())

    def _finish(self, sequence: Sequence) -> None:
        request = sequence.request
        self.sequences.finish(sequence)
        self.deadlines.drop(request.request_id)
        self.served.leave(request.options.client_id)

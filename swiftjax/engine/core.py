"""The engine itself: schedule, run, update. Knows no text, no transport and no thread.

It belongs to whoever calls `step`: the blocking Engine, or the one engine thread behind an
AsyncEngine. The device is reached through the Runner protocol only, so tests drive the whole
control plane with a runner whose tokens can be computed by hand.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from swiftjax.batch import Batch, PageMoves, Sampled
from swiftjax.engine.batching import make_batch
from swiftjax.engine.buckets import Buckets
from swiftjax.engine.choices import ChoiceTable
from swiftjax.engine.limits import EngineLimits
from swiftjax.engine.observer import Nobody, Observer
from swiftjax.engine.plan import Plan
from swiftjax.engine.request import Request, StepOutput
from swiftjax.engine.rows import count_tokens, has_penalties
from swiftjax.engine.scheduler import Scheduler
from swiftjax.engine.session_pages import PageStore, SessionPages
from swiftjax.engine.watchers import Several
from swiftjax.errors import InvalidRequestError, SwiftJaxError


@runtime_checkable
class PendingTokens(Protocol):
    """Tokens a dispatched step will have sampled."""

    def wait(self, num_rows: int) -> Sampled:
        """Block until the step is done and return its first `num_rows` rows."""
        ...


@runtime_checkable
class Runner(PageStore, Protocol):
    """The data plane, as the control plane sees it."""

    def dispatch(self, batch: Batch, moves: PageMoves) -> PendingTokens:
        """Move pages, then start one step; the KV cache advances with every call."""
        ...

    def load_counts(self, row: int, counts: np.ndarray) -> None:
        """Replace one row of the token counts, [V] uint16, before the next step."""
        ...


SECONDS_BETWEEN_CHECKS = 60.0


class InFlight(NamedTuple):
    """A step that runs, or has run and was not read yet."""

    plan: Plan
    pending: PendingTokens


class CoreStats(NamedTuple):
    """How busy the engine is."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_idle_pages: int = 0  # of the free ones: kept for prompts that may need their contents
    page_size: int = 0
    num_preemptions: int = 0
    num_session_pages: int = 0  # of those in use: kept by idle sessions, until others need them


class EngineCore:
    """One scheduler and one runner, stepped by one caller."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        buckets: Buckets,
        limits: EngineLimits,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        """With `overlaps`, a step is dispatched before the one before it is read."""
        self.scheduler = scheduler
        self.limits = limits
        self.sessions = SessionPages(scheduler.kept, runner, scheduler.pool.page_size)
        self._runner = runner
        self._buckets = buckets
        self._clock = clock
        self._observer = observer or Nobody()
        self._choices = ChoiceTable()
        self._overlaps = overlaps
        self._in_flight: InFlight | None = None
        self._next_check = -math.inf

    def add_observer(self, observer: Observer) -> None:
        """Let one more watch; only before the first step."""
        self._observer = Several(self._observer, observer)

    def submit(self, request: Request) -> None:
        """Queue a request with all its choices; raises InvalidRequestError or QueueFullError."""
        max_queue_len = self.scheduler.config.max_queue_len
        self.limits.check_windows(request.generation.streaming)
        if request.generation.n > max_queue_len:
            raise InvalidRequestError(
                f"n is {request.generation.n}; each choice waits in the queue, which holds "
                f"{max_queue_len}: lower n or raise max_queue_len"
            )
        # The scheduler knows choices by ids of their own, so it cannot see this clash.
        if request.request_id in self.scheduler:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use")
        choices = self._choices.split(request)
        for count, choice in enumerate(choices):
            try:
                self.scheduler.submit(choice)
            except SwiftJaxError:
                self._withdraw(choices, count)
                raise
            self._observer.submitted(choice)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its choices; the last StepOutput comes from the next `step`."""
        for choice_id in self._choices.ids_of(request_id, index):
            self._observer.told_to("abort", choice_id)
            self.scheduler.abort(choice_id)

    def pause(self, request_id: str) -> None:
        """Compute nothing for a request until `resume`; its tokens are kept. Unknown: ignored."""
        for choice_id in self._choices.ids_of(request_id):
            self._observer.told_to("pause", choice_id)
            self.scheduler.pause(choice_id)

    def resume(self, request_id: str) -> None:
        """Go on with a paused request; any other is ignored."""
        for choice_id in self._choices.ids_of(request_id):
            self._observer.told_to("resume", choice_id)
            self.scheduler.resume(choice_id)

    def forget_prefixes(self) -> None:
        """Drop every cached prompt prefix; pages in use stay with their owners."""
        self.scheduler.pool.forget_published()

    def forget_pages(self) -> None:
        """Drop every content that other weights computed; only while there is no work."""
        assert not self.has_work
        self.forget_prefixes()
        self.sessions.forget()

    def _withdraw(self, choices: list[Request], num_submitted: int) -> None:
        """Forget the choices of a request that was refused half way; they have no outputs."""
        for count, choice in enumerate(choices if len(choices) > 1 else []):
            if count < num_submitted:
                self._observer.told_to("abort", choice.request_id)
                self.scheduler.abort(choice.request_id)
            else:
                self._choices.forget(choice.request_id)

    def step(self) -> list[StepOutput]:
        """Run the loop that this core was built for once; what there is to tell."""
        outputs = self._step_overlapped() if self._overlaps else self._step_plain()
        return [self._choices.join(output) for output in outputs]

    def _step_plain(self) -> list[StepOutput]:
        """Schedule, run, read, update."""
        plan = self._plan()
        return self._read(self._dispatch(plan) if plan.work else None)

    def _step_overlapped(self) -> list[StepOutput]:
        """Dispatch the next step, then read the last one; unread tokens stay on the device."""
        last, self._in_flight = self._in_flight, None
        plan = self._plan(in_flight=last is not None)
        if plan.work:
            self._in_flight = self._dispatch(plan)
        return self._read(last)

    def _plan(self, *, in_flight: bool = False) -> Plan:
        now = self._clock()
        plan = self.scheduler.schedule(now, in_flight=in_flight)
        self._observer.planned(plan, now)
        return plan

    def _dispatch(self, plan: Plan) -> InFlight:
        self._load_counts(plan)
        pool = self.scheduler.pool
        batch = make_batch(
            plan,
            self.scheduler.rows,
            self._buckets,
            page_size=pool.page_size,
            num_slots=pool.num_pages * pool.page_size,
        )
        return InFlight(plan, self._runner.dispatch(batch, plan.moves))

    def _read(self, step: InFlight | None) -> list[StepOutput]:
        if step is None:
            outputs = self.scheduler.take_ended()
        else:
            num_rows = sum(work.samples for work in step.plan.work)
            outputs = self.scheduler.update(step.plan, step.pending.wait(num_rows))
        self._observer.read(step and step.plan, outputs)
        return outputs

    def _load_counts(self, plan: Plan) -> None:
        for sequence in plan.admitted:
            if has_penalties(sequence.request.generation):
                counts = count_tokens(sequence, self.limits.vocab_size)
                self._runner.load_counts(sequence.row, counts)

    @property
    def has_work(self) -> bool:
        """Whether any request is left, be it one that only waits (`seconds_to_work`)."""
        return self.scheduler.has_work or self._in_flight is not None

    def check_while_idle(self) -> None:
        """Assert that pages and rows agree, at most once a minute: it looks at every page."""
        now = self._clock()
        if now >= self._next_check:
            self._next_check = now + SECONDS_BETWEEN_CHECKS
            self.scheduler.check_integrity()

    def seconds_to_work(self) -> float:
        """How long `step` would have nothing to do; infinity if that is up to the callers."""
        if self._in_flight is not None:
            return 0.0
        return max(0.0, self.scheduler.next_work_time() - self._clock())

    def stats(self) -> CoreStats:
        """A snapshot of queue and cache use."""
        pool = self.scheduler.pool
        return CoreStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_free_pages=pool.num_free,
            num_pages=pool.num_pages,
            num_idle_pages=pool.num_idle,
            page_size=pool.page_size,
            num_preemptions=self.scheduler.num_preemptions,
            num_session_pages=self.scheduler.kept.num_on_device,
        )

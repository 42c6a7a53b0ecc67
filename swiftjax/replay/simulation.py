"""Runs the real Scheduler over a workload, on a timeline: its clock is not the machine's.

Nothing is computed: the tokens are stand-ins, and an answer is as long as it was recorded to be.
The loop is the one of `EngineCore`, plain or overlapped. Called by the `replay` command and tests.
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from swiftjax.batch import Sampled, Scores
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.plan import Plan
from swiftjax.engine.request import Request, StepOutput
from swiftjax.engine.rows import RowTable
from swiftjax.engine.scheduler import Scheduler
from swiftjax.engine.sequence import Sequence
from swiftjax.errors import SwiftJaxError
from swiftjax.replay.metrics import Outcome, Run
from swiftjax.replay.timelines import Event, Timeline
from swiftjax.replay.workload import STOP, Workload


class Unread(NamedTuple):
    """A step whose results are there at `end`."""

    plan: Plan
    end: float


def simulate(workload: Workload, timeline: Timeline) -> Run:
    """Run every request to its end, or as far as the timeline goes."""
    simulation = _Simulation(workload, timeline)
    while (now := simulation.next_time()) is not None:
        simulation.step(now)
    return simulation.run


class _Simulation:
    def __init__(self, workload: Workload, timeline: Timeline) -> None:
        self._workload = workload
        self._timeline = timeline
        self._scheduler = Scheduler(
            workload.config,
            PagePool(workload.num_pages, workload.page_size),
            RowTable(workload.config.max_num_seqs, workload.max_pages),
            costs=workload.costs,
        )
        self._events = deque(timeline.order(list(_events(workload))))
        self._unread: Unread | None = None
        self.run = Run(outcomes=[Outcome(arrival.request) for arrival in workload.arrivals])

    def next_time(self) -> float | None:
        """Let everything take effect that is due; the time of the next step."""
        while True:
            while self._events and self._timeline.is_due(self._events[0]):
                self._apply(self._events.popleft())
            work = -math.inf if self._unread else self._scheduler.next_work_time()
            if not self._timeline.wait(work, self._events[0] if self._events else None):
                return self._timeline.begin()

    def step(self, now: float) -> None:
        """Plan a step, and read it or the one before."""
        last, self._unread = self._unread, None
        plan = self._scheduler.schedule(now, in_flight=last is not None)
        end = self._timeline.run(plan)
        if plan.work:
            self._unread = Unread(plan, end)
            self._watch(plan, now)
        self._read(last, now)
        if self._unread is not None and not self._timeline.overlaps:
            last, self._unread = self._unread, None
            self._read(last, now)

    def _apply(self, event: Event) -> None:
        if event.what == "abort":
            self._scheduler.abort(str(event.number))
        elif event.what == "pause":
            self._scheduler.pause(str(event.number))
        elif event.what == "resume":
            self._scheduler.resume(str(event.number))
        else:
            self._submit(event.what, event.number)

    def _submit(self, request: Request, number: int) -> None:
        try:
            self._scheduler.submit(request)
        except SwiftJaxError:
            self.run.outcomes[number].finish_reason = "refused"

    def _watch(self, plan: Plan, now: float) -> None:
        for sequence in plan.admitted:
            self.run.outcomes[int(sequence.request.request_id)].start(now)
        self.run.times.append(now)
        self.run.num_running.append(self._scheduler.num_running)
        self.run.num_waiting.append(self._scheduler.num_waiting)
        self.run.num_preemptions = self._scheduler.num_preemptions

    def _read(self, step: Unread | None, now: float) -> None:
        if step is None:
            return self._tell(self._scheduler.take_ended(), now)
        self._timeline.read(step.end)
        self._tell(self._scheduler.update(step.plan, self._sample(step.plan)), step.end)

    def _tell(self, outputs: list[StepOutput], now: float) -> None:
        for output in outputs:
            self.run.outcomes[int(output.request_id)].add(output, now)

    def _sample(self, plan: Plan) -> Sampled:
        tokens = [self._token(work.sequence) for work in plan.work if work.samples]
        scores = None
        if any(work.sequence.wants_prompt_scores for work in plan.work):
            count = sum(work.num_new for work in plan.work)
            scores = Scores(np.zeros(count), np.zeros((count, 0)), np.zeros((count, 0)))
        return Sampled(tokens, [0.0] * len(tokens), prompt=scores)

    def _token(self, sequence: Sequence) -> int:
        arrival = self._workload.arrivals[int(sequence.request.request_id)]
        position = len(sequence.token_ids)
        if position + 1 - sequence.prompt_len == arrival.output_len:
            return STOP
        return arrival.stand_ins.token(position)


def _events(workload: Workload) -> Iterator[Event]:
    for number, arrival in enumerate(workload.arrivals):
        request = arrival.request
        yield Event(request.arrival_time, arrival.submitted, request, number)
    for moment, what, number in workload.commands:
        yield Event(moment.time, moment, what, number)

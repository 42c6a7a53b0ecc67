"""When things happen in a replay: by a simulated clock, or exactly as a trace recorded it.

Called by the simulation only.
"""

import math
from typing import NamedTuple, Protocol, runtime_checkable

from swiftjax.engine.observer import Command
from swiftjax.engine.plan import Plan
from swiftjax.engine.request import Request
from swiftjax.replay.cost_model import CostModel, load_of
from swiftjax.replay.workload import Moment, RecordedStep


class Event(NamedTuple):
    """A request comes (a Request), or the one of a number is told something."""

    time: float  # what clients decide: when it was asked, whatever the engine does
    moment: Moment  # when it took effect as recorded
    what: Request | Command
    number: int


@runtime_checkable
class Timeline(Protocol):
    """Says when things happen."""

    @property
    def overlaps(self) -> bool:
        """Whether the next step is planned before the last one is read."""
        ...

    def order(self, events: list[Event]) -> list[Event]:
        """Sort events as they take effect; of equals, the first stays the first."""
        ...

    def is_due(self, event: Event) -> bool:
        """Whether an event takes effect before the next step is planned."""
        ...

    def wait(self, work: float, event: Event | None) -> bool:
        """Let time pass if there is work only later, to then or to the event; False if not."""
        ...

    def begin(self) -> float | None:
        """The time at which the next step is planned; None ends the run."""
        ...

    def run(self, plan: Plan) -> float:
        """The time at which the step's results are there."""
        ...

    def read(self, end: float) -> None:
        """The results that were there at `end` were read."""
        ...


class Simulated:
    """Requests come by the clock; a cost model says how long steps take."""

    def __init__(
        self, model: CostModel, *, seconds_per_page: float = 0.0, overlaps: bool = False
    ) -> None:
        """`seconds_per_page` is what a page moved between device and host takes."""
        self._model = model
        self._seconds_per_page = seconds_per_page
        self._now = self._busy_until = -math.inf
        self._is_over = False
        self.overlaps = overlaps

    def order(self, events: list[Event]) -> list[Event]:
        """By time."""
        return sorted(events, key=lambda event: event.time)

    def is_due(self, event: Event) -> bool:
        """Whether its time has come."""
        return event.time <= self._now

    def wait(self, work: float, event: Event | None) -> bool:
        """Move the clock on."""
        if work <= self._now:
            return False
        until = min(work, math.inf if event is None else event.time)
        self._is_over = until == math.inf
        self._now = until
        return not self._is_over

    def begin(self) -> float | None:
        """Now, unless all is done."""
        return None if self._is_over else self._now

    def run(self, plan: Plan) -> float:
        """Keep the device busy, for nothing if the plan is empty."""
        if not plan.work:
            return self._now
        pages = sum(len(move.page_ids) for move in (*plan.moves.out, *plan.moves.back))
        load = load_of((work.start, work.num_new) for work in plan.work)
        seconds = self._model.seconds(load) + pages * self._seconds_per_page
        self._busy_until = max(self._now, self._busy_until) + seconds
        return self._busy_until

    def read(self, end: float) -> None:
        """Let the time pass until then."""
        self._now = max(self._now, end)


class Recorded:
    """Everything takes effect before the same step as in the trace, at the same times."""

    def __init__(self, steps: tuple[RecordedStep, ...]) -> None:
        self._steps = steps
        self._number = 0
        self._end = -math.inf
        self.num_equal = 0  # steps planned as they were recorded

    @property
    def overlaps(self) -> bool:
        """As recorded."""
        return self._number < len(self._steps) and self._steps[self._number].in_flight

    def order(self, events: list[Event]) -> list[Event]:
        """By step, and by time before one."""
        return sorted(events, key=lambda event: (event.moment.step, event.moment.time))

    def is_due(self, event: Event) -> bool:
        """Whether it came before the step that is next."""
        return event.moment.step <= self._number

    def wait(self, work: float, event: Event | None) -> bool:
        """Never: steps come when they came."""
        return False

    def begin(self) -> float | None:
        """When the step was planned; None after the last."""
        return self._steps[self._number].time if self._number < len(self._steps) else None

    def run(self, plan: Plan) -> float:
        """When the results were there; compares the plan."""
        step = self._steps[self._number]
        who = tuple((w.sequence.order, w.start, w.num_new, int(w.samples)) for w in plan.work)
        self.num_equal += who == step.who
        self._number += 1
        self._end = max(step.time, self._end) + step.took
        return self._end

    def read(self, end: float) -> None:
        """Nothing to do."""

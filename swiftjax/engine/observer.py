"""Whoever wants to watch an engine core: told of all that goes into plans and of what comes out.

The core calls it between its own steps, on its own thread; an observer must be quick and must not
raise. `Tracer` (in `tracer.py`) is one; by default nobody watches.
"""

from typing import Literal, Protocol, runtime_checkable

from swiftjax.engine.plan import Plan
from swiftjax.engine.request import Request, StepOutput

Command = Literal["abort", "pause", "resume"]


@runtime_checkable
class Observer(Protocol):
    """What a core tells. Requests are single choices here, under ids of their own."""

    def submitted(self, request: Request) -> None:
        """The scheduler took a request."""
        ...

    def told_to(self, what: Command, request_id: str) -> None:
        """A request was told to do something; the id may be unknown."""
        ...

    def planned(self, plan: Plan, now: float) -> None:
        """A step was planned at `now`, in the core's clock; it may hold no work."""
        ...

    def read(self, plan: Plan | None, outputs: list[StepOutput]) -> None:
        """A step's results were read, or outputs came without one (None)."""
        ...


class Nobody:
    """Watches nothing."""

    def submitted(self, request: Request) -> None:
        """Ignore it."""

    def told_to(self, what: Command, request_id: str) -> None:
        """Ignore it."""

    def planned(self, plan: Plan, now: float) -> None:
        """Ignore it."""

    def read(self, plan: Plan | None, outputs: list[StepOutput]) -> None:
        """Ignore it."""

"""Several observers of one core. Held by the core as soon as a second one comes."""

from swiftjax.engine.observer import Command, Observer
from swiftjax.engine.plan import Plan
from swiftjax.engine.request import Request, StepOutput


class Several:
    """Tells each in turn."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def submitted(self, request: Request) -> None:
        """Tell them."""
        for observer in self._observers:
            observer.submitted(request)

    def told_to(self, what: Command, request_id: str) -> None:
        """Tell them."""
        for observer in self._observers:
            observer.told_to(what, request_id)

    def planned(self, plan: Plan, now: float) -> None:
        """Tell them."""
        for observer in self._observers:
            observer.planned(plan, now)

    def read(self, plan: Plan | None, outputs: list[StepOutput]) -> None:
        """Tell them."""
        for observer in self._observers:
            observer.read(plan, outputs)

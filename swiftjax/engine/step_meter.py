"""What the engine's steps cost and how long requests waited, as numbers for whoever keeps metrics.

An `Observer` of the core. Keeps a moment for each request that runs, and no text. `EngineLoop` asks
it after every step; it knows nothing of Prometheus.
"""

import time
from collections import deque
from typing import NamedTuple

from swiftjax.engine.observer import Command
from swiftjax.engine.plan import Plan
from swiftjax.engine.request import Request, StepOutput


class StepTime(NamedTuple):
    """One step, from its plan to its tokens."""

    is_decode: bool  # one new token for every sequence
    seconds: float
    num_tokens: int


class StepReport(NamedTuple):
    """What happened since the last report; of the last three, one entry per request."""

    steps: tuple[StepTime, ...]
    num_generated: int
    num_looked_for: int  # prompt tokens, in the prefix cache
    num_found: int
    queue_seconds: tuple[float, ...] = ()  # from arrival to the first step
    prefill_seconds: tuple[float, ...] = ()  # from there to the first token
    decode_seconds: tuple[float, ...] = ()  # from there to the end


class StepMeter:
    """Measures one core, on its thread."""

    def __init__(self) -> None:
        self._planned: deque[float] = deque()  # when: steps that were not read yet
        self._started: dict[str, float] = {}  # requests without a token yet
        self._first_token: dict[str, float] = {}
        self._clear()

    def take(self) -> StepReport | None:
        """Give what happened since the last call; None for nothing."""
        if not self._steps and not self._decode:
            return None
        report = StepReport(
            tuple(self._steps),
            self._num_generated,
            self._num_looked_for,
            self._num_found,
            tuple(self._queue),
            tuple(self._prefill),
            tuple(self._decode),
        )
        self._clear()
        return report

    def submitted(self, request: Request) -> None:
        """Nothing is measured before the first step."""

    def told_to(self, what: Command, request_id: str) -> None:
        """Its effect is measured."""

    def planned(self, plan: Plan, now: float) -> None:
        """Take the moment; `now` is in the clock of arrival times."""
        if not plan.work:
            return
        self._planned.append(time.monotonic())
        for sequence in plan.admitted:
            request = sequence.request
            known = request.request_id in self._started or request.request_id in self._first_token
            if not known:  # else it comes back after a preemption
                self._started[request.request_id] = now
                self._queue.append(max(0.0, now - request.arrival_time))
                self._num_looked_for += sequence.prompt_len
                self._num_found += sequence.num_cached or 0

    def read(self, plan: Plan | None, outputs: list[StepOutput]) -> None:
        """Take what a step brought."""
        now = time.monotonic()
        if plan is not None:
            num_tokens = sum(work.num_new for work in plan.work)
            is_decode = num_tokens == len(plan.work)
            self._steps.append(StepTime(is_decode, now - self._planned.popleft(), num_tokens))
        for output in outputs:
            self._num_generated += len(output.token_ids)
            request_id = output.request_id
            if output.token_ids and request_id in self._started:
                self._prefill.append(now - self._started.pop(request_id))
                self._first_token[request_id] = now
            if output.finish_reason is not None:
                self._started.pop(request_id, None)
                if (first := self._first_token.pop(request_id, None)) is not None:
                    self._decode.append(now - first)

    def _clear(self) -> None:
        self._steps: list[StepTime] = []
        self._queue: list[float] = []
        self._prefill: list[float] = []
        self._decode: list[float] = []
        self._num_generated = self._num_looked_for = self._num_found = 0

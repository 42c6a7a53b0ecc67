"""What became of each request, and the figures of a whole run.

Times are in seconds of the run's clock. Called by the simulation, which fills in outcomes, and by
the `replay` command, which sums them up.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from swiftjax.engine.request import FinishReason, Request, StepOutput

SPREADS = ("waiting", "ttft", "inter_token")


@dataclass(slots=True)
class Outcome:
    """One request in one run; None where it did not come to that."""

    request: Request
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    gaps: list[float] = field(default_factory=list)  # between tokens
    ended: float | None = None
    finish_reason: FinishReason | Literal["refused"] | None = None

    def start(self, now: float) -> None:
        """It got its first share of a step, or came back after a preemption."""
        if self.started is None:
            self.started = now

    def add(self, output: StepOutput, now: float) -> None:
        """Take what a step gave it."""
        if output.token_ids:
            if self.last_token is None:
                self.first_token = now
            else:
                self.gaps.append(now - self.last_token)
            self.last_token = now
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.ended = now

    @property
    def num_tokens(self) -> int:
        """Tokens it got."""
        return 0 if self.last_token is None else len(self.gaps) + 1

    @property
    def is_answered(self) -> bool:
        """Whether it got its whole answer."""
        return self.finish_reason in ("stop", "length")

    @property
    def waiting(self) -> float | None:
        """Seconds until it began to run."""
        return None if self.started is None else self.started - self.request.arrival_time

    @property
    def ttft(self) -> float | None:
        """Seconds until its first token."""
        return None if self.first_token is None else self.first_token - self.request.arrival_time

    def meets(self, goal: "Goal") -> bool:
        """Whether the whole answer came fast enough."""
        if not self.is_answered or self.ttft is None or self.ttft > goal.ttft:
            return False
        return not self.gaps or sum(self.gaps) / len(self.gaps) <= goal.inter_token


@dataclass(kw_only=True, slots=True)
class Run:
    """What happened: all requests, in order, and how full the engine was at each step."""

    outcomes: list[Outcome]
    times: list[float] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)
    num_preemptions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What counts as a good answer: seconds to the first token, mean seconds between tokens."""

    ttft: float = 0.5
    inter_token: float = 0.03


class Spread(NamedTuple):
    """Seconds; None where there is nothing to sum up."""

    mean: float | None
    p50: float | None
    p99: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A run in figures. Goodput leaves out requests that their client gave up."""

    policy: str
    requests: int
    answered: int
    aborted: int
    timed_out: int
    refused: int
    waiting: Spread
    ttft: Spread
    inter_token: Spread
    goodput: float | None  # share of requests whose answer met the goal
    goodput_per_second: float
    tokens_per_second: float
    preemptions: int
    steps: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """All figures by name; times in seconds."""
        spreads = {name: getattr(self, name)._asdict() for name in SPREADS}
        return asdict(self) | spreads


def summarise(policy: str, run: Run, goal: Goal) -> Summary:
    """Sum up a run; it lasts from the first arrival to the last end."""
    outcomes = run.outcomes
    reasons = [outcome.finish_reason for outcome in outcomes]
    arrivals = [outcome.request.arrival_time for outcome in outcomes]
    ends = [outcome.ended for outcome in outcomes if outcome.ended is not None]
    seconds = max(ends) - min(arrivals) if ends else 0.0
    good = sum(outcome.meets(goal) for outcome in outcomes)
    judged = len(outcomes) - reasons.count("abort")
    tokens = sum(outcome.num_tokens for outcome in outcomes)
    return Summary(
        policy=policy,
        requests=len(outcomes),
        answered=sum(outcome.is_answered for outcome in outcomes),
        aborted=reasons.count("abort"),
        timed_out=reasons.count("time_limit"),
        refused=reasons.count("refused"),
        waiting=_spread(outcome.waiting for outcome in outcomes),
        ttft=_spread(outcome.ttft for outcome in outcomes),
        inter_token=_spread(gap for outcome in outcomes for gap in outcome.gaps),
        goodput=good / judged if judged else None,
        goodput_per_second=good / seconds if seconds else 0.0,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        preemptions=run.num_preemptions,
        steps=len(run.times),
        seconds=seconds,
    )


def _spread(values: Iterable[float | None]) -> Spread:
    known = np.array([value for value in values if value is not None], np.float64)
    if not len(known):
        return Spread(None, None, None)
    p50, p99 = np.percentile(known, [50, 99])
    return Spread(float(known.mean()), float(p50), float(p99))

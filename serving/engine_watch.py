"""What the engine's steps cost, as metrics: told by the core on its thread, read by any.

An `Observer` of the core. Keeps a moment for each request that runs, and no text.
"""

import threading
import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Histogram

from swiftjax.engine.observer import Command
from swiftjax.engine.plan import Plan
from swiftjax.engine.request import Request, StepOutput
from swiftjax.serving import buckets

RATE_SECONDS = 10


class EngineWatch:
    """The engine's side of the metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step", buckets.SHORT_SECONDS
        )
        self._prefill_time = self._histogram(
            "prefill_time_seconds", "From the first step to the first token", buckets.SHORT_SECONDS
        )
        self._decode_time = self._histogram(
            "decode_time_seconds", "From the first token to the end", buckets.SHORT_SECONDS
        )
        self._step_seconds = Histogram(
            "swiftjax_step_seconds",
            "One step, from its plan to its tokens",
            ["phase"],
            buckets=buckets.PER_TOKEN,
            registry=self.registry,
        )
        self._step_tokens = self._histogram(
            "step_tokens", "Tokens computed in one step", buckets.STEP_TOKENS
        )
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked for")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found")
        self._phases = {phase: self._step_seconds.labels(phase) for phase in ("decode", "mixed")}
        self._steps: deque[tuple[Plan, float]] = deque()  # planned and not read
        self._started: dict[str, float] = {}  # requests without a token yet
        self._first_token: dict[str, float] = {}
        self._rate = Rate()
        self.last_sign = time.monotonic()

    def tokens_per_second(self) -> float:
        """Generated tokens a second, over the last few seconds."""
        return self._rate.value(time.monotonic())

    def submitted(self, request: Request) -> None:
        """Nothing is measured before the first step."""

    def told_to(self, what: Command, request_id: str) -> None:
        """Its effect is measured."""

    def planned(self, plan: Plan, now: float) -> None:
        """Take the moment; `now` is in the clock of arrival times."""
        self.last_sign = time.monotonic()
        if not plan.work:
            return
        self._steps.append((plan, self.last_sign))
        self._step_tokens.observe(sum(work.num_new for work in plan.work))
        for sequence in plan.admitted:
            request = sequence.request
            known = request.request_id in self._started or request.request_id in self._first_token
            if not known:  # else it comes back after a preemption
                self._started[request.request_id] = now
                self._queue_time.observe(max(0.0, now - request.arrival_time))
                self._queries.inc(sequence.prompt_len)
                self._hits.inc(sequence.num_cached or 0)

    def read(self, plan: Plan | None, outputs: list[StepOutput]) -> None:
        """Take what a step brought."""
        now = self.last_sign = time.monotonic()
        if plan is not None:
            _, begun = self._steps.popleft()
            is_decode = all(work.num_new == 1 for work in plan.work)
            self._phases["decode" if is_decode else "mixed"].observe(now - begun)
        count = 0
        for output in outputs:
            count += len(output.token_ids)
            request_id = output.request_id
            if output.token_ids and request_id in self._started:
                self._prefill_time.observe(now - self._started.pop(request_id))
                self._first_token[request_id] = now
            if output.finish_reason is not None:
                self._started.pop(request_id, None)
                if (first := self._first_token.pop(request_id, None)) is not None:
                    self._decode_time.observe(now - first)
        self._rate.add(now, count)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"swiftjax_{name}", text, buckets=bounds, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"swiftjax_{name}", text, registry=self.registry)


class Rate:
    """A count per second over the last whole seconds; written by one thread, read by others."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, now: float, count: int) -> None:
        """Count something that happened now."""
        with self._lock:
            second = int(now)
            self._counts[second] = self._counts.get(second, 0) + count
            while len(self._counts) > RATE_SECONDS + 1:
                del self._counts[next(iter(self._counts))]

    def value(self, now: float) -> float:
        """The mean over the last RATE_SECONDS whole seconds."""
        with self._lock:
            last = range(int(now) - RATE_SECONDS, int(now))
            return sum(self._counts.get(second, 0) for second in last) / RATE_SECONDS

"""What the engine's steps cost, as metrics: filled from the reports of a `StepMeter`.

Belongs to the event loop, which the engine's news reach; it outlives an engine that is replaced.
"""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram

from swiftjax.engine.step_meter import StepReport
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
        self._rate = Rate()
        self.last_sign = time.monotonic()

    def tokens_per_second(self) -> float:
        """Generated tokens a second, over the last few seconds."""
        return self._rate.value(time.monotonic())

    def take(self, report: StepReport | None) -> None:
        """Take a sign of life, and what was measured since the last one."""
        self.last_sign = time.monotonic()
        if report is None:
            return
        for is_decode, seconds, num_tokens in report.steps:
            self._phases["decode" if is_decode else "mixed"].observe(seconds)
            self._step_tokens.observe(num_tokens)
        for histogram, values in (
            (self._queue_time, report.queue_seconds),
            (self._prefill_time, report.prefill_seconds),
            (self._decode_time, report.decode_seconds),
        ):
            for value in values:
                histogram.observe(value)
        self._queries.inc(report.num_looked_for)
        self._hits.inc(report.num_found)
        self._rate.add(self.last_sign, report.num_generated)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"swiftjax_{name}", text, buckets=bounds, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"swiftjax_{name}", text, registry=self.registry)


class Rate:
    """A count per second over the last whole seconds."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, now: float, count: int) -> None:
        """Count something that happened now."""
        second = int(now)
        self._counts[second] = self._counts.get(second, 0) + count
        while len(self._counts) > RATE_SECONDS + 1:
            del self._counts[next(iter(self._counts))]

    def value(self, now: float) -> float:
        """The mean over the last RATE_SECONDS whole seconds."""
        last = range(int(now) - RATE_SECONDS, int(now))
        return sum(self._counts.get(second, 0) for second in last) / RATE_SECONDS

"""What one server tells Prometheus: names, and the front end's own measurements.

No global state: each server has its registries, and every sample gets the label `model_name`. No
label names a user or a key, and no text of a request comes in here.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from swiftjax.engine.request import StreamOutput
from swiftjax.errors import (
    DeadlineError,
    KeyLimitError,
    QueueFullError,
    SwiftJaxError,
    UnauthenticatedError,
)
from swiftjax.serving import buckets
from swiftjax.serving.status import BUG, statuses_of
from swiftjax.serving.tally import MessageTally

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@runtime_checkable
class Source(Protocol):
    """Whatever gives metrics: a registry, or a collector that looks when it is asked."""

    def collect(self) -> Iterable[Metric]:
        """Give every metric once."""
        ...


class Metrics:
    """The metrics of one server; both transports write to the same."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._others: list[Source] = []
        self._model_name = ""
        self._requests = self._counter(
            "requests", "Requests by how they ended", "status", "finish_reason", "protocol"
        )
        self._aborts = self._counter("aborts", "Requests that were ended early", "reason")
        self._shed = self._counter("shed", "Requests that were refused for load", "reason")
        self._auth_failures = self._counter("auth_failures", "Calls without a valid key")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests")
        self._ttft = self._histogram("time_to_first_token_seconds", buckets.TTFT)
        self._messages = MessageTally(buckets.PER_TOKEN)
        self._tpot = self._histogram("request_time_per_output_token_seconds", buckets.PER_TOKEN)
        self._e2e = self._histogram("e2e_request_latency_seconds", buckets.SECONDS)
        self._prompt_len = self._histogram("request_prompt_tokens", buckets.TOKENS)
        self._output_len = self._histogram("request_generation_tokens", buckets.TOKENS)
        self.grammar_compile = self._histogram("grammar_compile_seconds", buckets.SHORT_SECONDS)
        self.engine_restarts = self._counter("engine_restarts", "Engines started for dead ones")
        self.loop_lag = self._histogram("frontend_loop_lag_seconds", buckets.PER_TOKEN)

    def attach(self, model_name: str, *others: Source) -> None:
        """Name the model, and whatever else is to be told of it."""
        self._model_name = model_name
        self._others = list(others)

    def render(self) -> bytes:
        """Write everything in Prometheus' text form."""
        parts = [self._registry, self._messages, *self._others]
        return generate_latest(_Labelled(self._model_name, parts))

    def count_error(self, error: Exception, protocol: str) -> None:
        """Count a call that ended with an error, of generation or not."""
        row = statuses_of(error) if isinstance(error, SwiftJaxError) else BUG
        self._requests.labels(row.grpc.name, "", protocol).inc()
        if isinstance(error, UnauthenticatedError):
            self._auth_failures.inc()
        elif isinstance(error, QueueFullError):
            is_of_key = isinstance(error, KeyLimitError)
            self._shed.labels("key_limit" if is_of_key else "queue_full").inc()
        elif isinstance(error, DeadlineError):
            self._aborts.labels("deadline").inc()

    async def watch(
        self, stream: AsyncGenerator[StreamOutput, None], protocol: str, num_choices: int
    ) -> AsyncGenerator[StreamOutput, None]:
        """Pass a stream on and measure it; closes it when it is closed itself."""
        watched = _Watched(self, protocol, num_choices)
        try:
            async with aclosing(stream):
                async for output in stream:
                    watched.see(output)
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            if watched.num_open:
                self._aborts.labels("client").inc()
                self._requests.labels("CANCELLED", "", protocol).inc()
            raise

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"swiftjax_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, bounds: tuple[float, ...]) -> Histogram:
        text = name.replace("_", " ")
        return Histogram(f"swiftjax_{name}", text, buckets=bounds, registry=self._registry)


class _Watched:
    """One stream while it is measured."""

    def __init__(self, metrics: Metrics, protocol: str, num_choices: int) -> None:
        self._metrics = metrics
        self._protocol = protocol
        self._begun = time.monotonic()
        self._last: dict[int, float] = {}  # when each choice brought its last tokens
        self._first: dict[int, float] = {}
        self.num_open = num_choices  # of which the end was not seen

    def see(self, output: StreamOutput) -> None:
        """Measure what came, which may be several tokens at once."""
        now, metrics, index = time.monotonic(), self._metrics, output.index
        count = len(output.token_ids)
        if not self._first:
            metrics._ttft.observe(now - self._begun)
            metrics._prompt_tokens.inc(output.num_prompt_tokens)
            metrics._prompt_len.observe(output.num_prompt_tokens)
        if index not in self._first:
            self._first[index] = now
        elif count:
            metrics._messages.observe((now - self._last[index]) / count)
        self._last[index] = now
        metrics._messages.num_tokens += count
        if output.finish_reason is not None:
            self.num_open -= 1
            self._end(output, now)

    def _end(self, output: StreamOutput, now: float) -> None:
        metrics, count = self._metrics, output.num_output_tokens
        assert output.finish_reason is not None
        metrics._requests.labels("OK", output.finish_reason, self._protocol).inc()
        metrics._e2e.observe(now - self._begun)
        metrics._output_len.observe(count)
        if count > 1:
            metrics._tpot.observe((now - self._first[output.index]) / (count - 1))
        if output.finish_reason == "time_limit":
            metrics._aborts.labels("deadline").inc()


class _Labelled(Collector):
    """All samples of some collectors, each with the model's name."""

    def __init__(self, model_name: str, parts: list[Source]) -> None:
        self._model_name = model_name
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        """Give every metric once."""
        for part in self._parts:
            for metric in part.collect():
                metric.samples = [
                    sample._replace(labels={"model_name": self._model_name, **sample.labels})
                    for sample in metric.samples
                ]
                yield metric

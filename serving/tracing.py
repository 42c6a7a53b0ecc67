"""OpenTelemetry spans of requests, if the operator asked for them; off otherwise.

A span says what kind of request it was, how long it took and how it ended, by the conventions for
generative AI. It never has text of a prompt or an answer. The only module that knows OpenTelemetry,
which is the extra `otel`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from swiftjax.engine.request import GenerationConfig, StreamOutput
from swiftjax.errors import InvalidRequestError, SwiftJaxError
from swiftjax.serving.caller import current_caller
from swiftjax.serving.status import BUG, statuses_of

Operation = Literal["chat", "text_completion"]
PROVIDER = "swiftjax"


class Tracer:
    """Makes a span of every request, under the one that the caller named (W3C traceparent)."""

    def __init__(self, provider: Any) -> None:
        """`provider` is a TracerProvider, which decides where spans go."""
        self._tracer = provider.get_tracer(PROVIDER)

    async def watch(
        self,
        stream: AsyncGenerator[StreamOutput, None],
        model: str,
        operation: Operation,
        config: GenerationConfig,
    ) -> AsyncGenerator[StreamOutput, None]:
        """Pass a stream on inside a span; closes it when it is closed itself."""
        span = self._start(model, operation, config)
        begun, counts = time.monotonic(), _Counts()
        try:
            async with aclosing(stream):
                async for output in stream:
                    if not counts.reasons and not counts.output:
                        span.set_attribute(
                            "gen_ai.server.time_to_first_token", time.monotonic() - begun
                        )
                    counts.see(output)
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            if len(counts.reasons) < config.n:
                span.set_attribute("error.type", "CANCELLED")
            raise
        except Exception as error:
            _mark(span, error)
            raise
        finally:
            counts.write(span)
            span.end()

    def _start(self, model: str, operation: Operation, config: GenerationConfig) -> Any:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = {"traceparent": current_caller().trace_parent}
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.choice.count": config.n,
            "gen_ai.request.temperature": config.temperature,
            "gen_ai.request.top_p": config.top_p,
        }
        if config.max_new_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = config.max_new_tokens
        return self._tracer.start_span(
            f"{operation} {model}",
            context=TraceContextTextMapPropagator().extract(parent),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )


class _Counts:
    """What a stream has told so far."""

    def __init__(self) -> None:
        self.prompt = self.cached = 0
        self.output: dict[int, int] = {}
        self.reasons: dict[int, str] = {}

    def see(self, output: StreamOutput) -> None:
        """Take the totals of one choice."""
        self.prompt, self.cached = output.num_prompt_tokens, output.num_cached_tokens
        self.output[output.index] = output.num_output_tokens
        if output.finish_reason is not None:
            self.reasons[output.index] = output.finish_reason

    def write(self, span: Any) -> None:
        """Write them."""
        span.set_attribute("gen_ai.usage.input_tokens", self.prompt)
        span.set_attribute("gen_ai.usage.output_tokens", sum(self.output.values()))
        reasons = [reason for _, reason in sorted(self.reasons.items())]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)


def _mark(span: Any, error: Exception) -> None:
    from opentelemetry.trace import Status, StatusCode

    row = statuses_of(error) if isinstance(error, SwiftJaxError) else BUG
    # Not the message: it may quote what was asked.
    span.set_attribute("error.type", row.grpc.name)
    span.set_status(Status(StatusCode.ERROR))


def make_tracer(endpoint: str) -> Tracer:
    """Send spans to an OTLP collector over gRPC, e.g. `http://127.0.0.1:4317`.

    Raises InvalidRequestError where OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise InvalidRequestError(
            "--otlp-endpoint needs OpenTelemetry: pip install 'swiftjax[otel]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": PROVIDER}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider)

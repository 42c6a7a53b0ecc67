"""Spans: what they say, under whom they are, and that they have no text."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from swiftjax.cli.systemd import notify
from swiftjax.errors import InvalidRequestError
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.tracing import Tracer, make_tracer
from tests.serving.harness import join, long_request, until
from tests.serving.http.harness import HttpService, run

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARY = "canary-prompt-4711"


def traced(service: HttpService) -> InMemorySpanExporter:
    """Trace a server, into memory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    listeners, tracer = service.listeners, Tracer(provider)
    assert listeners.http is not None
    holders: list[Any] = [listeners.http._routes, listeners.grpc._service]
    for holder in holders:
        holder.served = holder.served._replace(tracer=tracer)
    return exporter


def test_a_span_says_how_a_request_went_and_nothing_of_its_text() -> None:
    async def body(service: HttpService) -> None:
        exporter = traced(service)
        messages = [{"role": "user", "content": CANARY}]
        headers = {"traceparent": PARENT}
        request = {"messages": messages, "max_tokens": 3, "n": 2, "temperature": 0.5}
        response = await service.client.post("/v1/chat/completions", json=request, headers=headers)
        assert response.status_code == 200
        await service.post("/v1/completions", {"prompt": [CANARY, "b"], "max_tokens": 1})
        await service.refused("/v1/completions", {"prompt": [5000] * 2, "user": CANARY})
        chat, *completions, refused = exporter.get_finished_spans()
        assert chat.name == "chat bytes" and chat.parent is not None
        assert f"{chat.context.trace_id:032x}" in PARENT
        assert f"{chat.parent.span_id:016x}" in PARENT
        told = dict(chat.attributes or {})
        assert 0 < told.pop("gen_ai.server.time_to_first_token") < 10  # type: ignore[operator]
        assert told == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "swiftjax",
            "gen_ai.request.model": "bytes",
            "gen_ai.response.model": "bytes",
            "gen_ai.request.choice.count": 2,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.max_tokens": 3,
            "gen_ai.usage.input_tokens": len(f"user:{CANARY};"),
            "gen_ai.usage.output_tokens": 6,
            "gen_ai.response.finish_reasons": ("length", "length"),
        }
        assert [span.name for span in completions] == ["text_completion bytes"] * 2
        assert refused.attributes is not None
        assert refused.attributes["error.type"] == "INVALID_ARGUMENT"
        assert not refused.status.is_ok and refused.status.description is None
        for span in (chat, *completions, refused):
            assert CANARY not in span.to_json()

    run(body)


def test_over_grpc_and_when_the_client_leaves() -> None:
    async def body(service: HttpService) -> None:
        exporter = traced(service)
        async with grpc.aio.insecure_channel(service.listeners.grpc.address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=CANARY)])
            stop = pb.StopOptions(max_new_tokens=2)
            request = pb.GenerateRequest(chat=chat, stop=stop)
            await join(stub.Generate(request, metadata=(("traceparent", PARENT),)))
            call = stub.Generate(long_request())
            await anext(aiter(call))
            call.cancel()
            await until(service.is_idle)
            await until(lambda: len(exporter.get_finished_spans()) == 2)
        first, left = exporter.get_finished_spans()
        assert first.name == "chat bytes" and f"{first.context.trace_id:032x}" in PARENT
        assert left.parent is None and left.attributes is not None
        assert left.attributes["error.type"] == "CANCELLED"
        assert CANARY not in json.dumps([span.to_json() for span in (first, left)])

    run(body, delay=0.005)


def test_without_the_extra_the_operator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidRequestError, match=r"swiftjax\[otel\]"):
        make_tracer("http://127.0.0.1:4317")


def test_servers_that_do_not_trace_load_nothing_of_it() -> None:
    code = "import sys, swiftjax.serving.listeners; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # (The path of a socket has 107 bytes at most, which the folder's may take alone.)
    monkeypatch.chdir(tmp_path)
    path = Path("/proc/self/cwd/notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        notify("READY=1")
        for address in (str(path), "", "relative"):
            monkeypatch.setenv("NOTIFY_SOCKET", address)
            notify("READY=1")
        receiver.setblocking(False)
        assert receiver.recv(100) == b"READY=1"
        with pytest.raises(BlockingIOError):
            receiver.recv(100)

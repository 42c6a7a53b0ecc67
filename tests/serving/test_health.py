"""grpc.health.v1 and reflection: what they say in each state of the server."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from swiftjax.errors import SwiftJaxError
from swiftjax.serving.addresses import is_loopback
from swiftjax.serving.grpc_server import MAX_CALLS_PER_CONNECTION, SERVICES, GrpcServer
from swiftjax.serving.messages import describe_model
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.served import Served
from tests.serving.harness import (
    MODEL,
    PATIENCE,
    long_request,
    make_core,
    make_engine,
    serving,
    status_of,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(channel: grpc.aio.Channel) -> set[int]:
    """The different states of all services."""
    stub = health_pb2_grpc.HealthStub(channel)
    requests = [health_pb2.HealthCheckRequest(service=name) for name in SERVICES]
    return {(await stub.Check(request)).status for request in requests}


@asynccontextmanager
async def channel_to(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    """A started server and a channel to it."""
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield channel
    finally:
        await server.stop()


def test_health_follows_loading_serving_and_draining() -> None:
    async def main() -> None:
        core = make_core(delay=0.01)
        engine = make_engine(core)
        server = GrpcServer("127.0.0.1", 0)
        async with channel_to(server) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            assert await health_of(channel) == {NOT_SERVING}
            code, details = await status_of(stub.Generate(long_request()))
            assert code == grpc.StatusCode.UNAVAILABLE and "loading" in details

            model = describe_model("bytes", MODEL, core.limits, engine.tokenizer)
            await server.open(Served(engine, model))
            assert await health_of(channel) == {SERVING}
            running = stub.Generate(long_request())
            await anext(aiter(running))

            drained = asyncio.create_task(server.drain("going away", 30))
            async with asyncio.timeout(PATIENCE):
                while await health_of(channel) != {NOT_SERVING}:
                    await asyncio.sleep(0)
            for call in (stub.Generate(long_request()), stub.GetModel(pb.GetModelRequest())):
                code, details = await status_of(call)
                assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "going away")
            assert not drained.done()
            running.cancel()
            assert await asyncio.wait_for(drained, PATIENCE)
        await engine.close()

    asyncio.run(main())


def test_drain_gives_up_in_time_and_a_watcher_does_not_hold_it_up() -> None:
    async def main() -> None:
        async with serving(make_core(delay=0.01)) as service:
            watch = health_pb2_grpc.HealthStub(service.channel).Watch(
                health_pb2.HealthCheckRequest()
            )
            states = aiter(watch)
            assert (await anext(states)).status == SERVING
            running = service.stub.Generate(long_request())
            await anext(aiter(running))
            assert await service.server.drain("going away", 0.1) is False
            assert (await anext(states)).status == NOT_SERVING
            running.cancel()
            assert await service.server.drain("going away", 5) is True
            watch.cancel()

    asyncio.run(main())


def test_unknown_service_is_not_found() -> None:
    async def main() -> None:
        async with serving(make_core()) as service:
            stub = health_pb2_grpc.HealthStub(service.channel)
            call = stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
            assert (await status_of(call))[0] == grpc.StatusCode.NOT_FOUND

    asyncio.run(main())


async def reflected(channel: grpc.aio.Channel) -> set[str]:
    """The services that reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for response in stub.ServerReflectionInfo(iter([request])):
        return {service.name for service in response.list_services_response.service}
    raise AssertionError("no answer")


def test_reflection_on_loopback_only() -> None:
    async def main() -> None:
        async with channel_to(GrpcServer("127.0.0.1", 0)) as channel:
            names = await reflected(channel)
            assert {"swiftjax.v1.GenerationService", "grpc.health.v1.Health"} <= names
        server = GrpcServer("0.0.0.0", 0)
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            assert await health_of(channel) == {NOT_SERVING}
            with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                await reflected(channel)
        await server.stop()

    asyncio.run(main())


def test_taken_port_is_an_error_that_names_it() -> None:
    async def main() -> None:
        server = GrpcServer("127.0.0.1", 0)
        await server.start()
        with pytest.raises(SwiftJaxError, match=f"127.0.0.1:{server.port}.*another port"):
            GrpcServer("127.0.0.1", server.port)
        await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("localhost.example.org", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_calls_of_one_connection_are_bounded() -> None:
    """The server says so in its first frame, and refuses more before they cost anything."""

    async def main() -> None:
        server = GrpcServer("127.0.0.1", 0)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")  # and empty settings
        head = await reader.readexactly(9)
        assert head[3] == 4  # SETTINGS
        settings = dict(struct.iter_unpack("!HI", await reader.readexactly(head[2])))
        assert settings[3] == MAX_CALLS_PER_CONNECTION
        writer.close()
        await server.stop()

    asyncio.run(main())

"""AdminService: abort, load, drain, flush; and the calls of several requests or models."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swiftjax.serving.grpc_server import GrpcServer
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from tests.serving.harness import Service, join, long_request, status_of, until
from tests.serving.test_cancel import run


def admin(service: Service) -> pb_grpc.AdminServiceStub:
    """The operator's side."""
    return pb_grpc.AdminServiceStub(service.channel)


def short(text: str, count: int, **fields: object) -> pb.GenerateRequest:
    """A request for a few tokens."""
    stop = pb.StopOptions(max_new_tokens=count)
    return pb.GenerateRequest(text=text, stop=stop, **fields)  # type: ignore[arg-type]


def test_abort_ends_requests_with_what_there_is() -> None:
    async def body(service: Service) -> None:
        call = service.stub.Generate(long_request(request_id="mine"))
        other = service.stub.Generate(long_request(request_id="other"))
        await anext(aiter(call))
        await anext(aiter(other))
        request = pb.AbortRequest(request_ids=["unknown", "mine", "mine"])
        await admin(service).Abort(request)
        _, last = await join(call)
        assert last.finish_reason == pb.FINISH_REASON_ABORT
        assert service.engine.stats().num_running == 1
        other.cancel()
        await until(service.is_idle)

    run(body, delay=0.005)


def test_load_and_flush() -> None:
    async def body(service: Service) -> None:
        prompt = "x" * 41
        for cached in (0, 40):
            _, last = await join(service.stub.Generate(short(prompt, 1)))
            assert last.usage.cached_tokens == cached
        load = await admin(service).GetLoad(pb.GetLoadRequest())
        assert load.num_running == load.num_waiting == 0 and not load.is_draining
        assert load.num_free_pages == load.num_pages == 4096 and load.page_size == 4
        assert load.num_cached_pages == 10
        await admin(service).FlushPrefixCache(pb.FlushPrefixCacheRequest())
        _, last = await join(service.stub.Generate(short(prompt, 1)))
        assert last.usage.cached_tokens == 0

    run(body, delay=0.0)


def test_drain_refuses_new_calls_and_lets_the_others_end() -> None:
    async def body(service: Service) -> None:
        running = service.stub.Generate(short("a", 40))
        await anext(aiter(running))
        await admin(service).Drain(pb.DrainRequest())
        code, details = await status_of(service.stub.Generate(short("a", 1)))
        assert code == grpc.StatusCode.UNAVAILABLE and "no new calls" in details
        health = health_pb2_grpc.HealthStub(service.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await admin(service).GetLoad(pb.GetLoadRequest())).is_draining
        _, last = await join(running)
        assert last.finish_reason == pb.FINISH_REASON_LENGTH

    run(body, delay=0.005)


def test_without_keys_there_is_no_admin_beyond_loopback() -> None:
    async def body(service: Service) -> None:
        server = GrpcServer("0.0.0.0", 0)
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = pb_grpc.AdminServiceStub(channel).GetLoad(pb.GetLoadRequest())
            assert (await status_of(call))[0] == grpc.StatusCode.UNIMPLEMENTED
        await server.stop()

    run(body, delay=0.0)


def test_admin_waits_for_the_model() -> None:
    async def body(service: Service) -> None:
        server = GrpcServer("127.0.0.1", 0)
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = pb_grpc.AdminServiceStub(channel)
            for call in (stub.GetLoad(pb.GetLoadRequest()), stub.Drain(pb.DrainRequest())):
                assert (await status_of(call))[0] == grpc.StatusCode.UNAVAILABLE
        await server.stop()

    run(body, delay=0.0)


def test_batch_is_answered_request_by_request() -> None:
    async def body(service: Service) -> None:
        two = pb.SamplingOptions(n=2)
        requests = [short("a", 3), short("x", 2, sampling=two), short("A", 1, request_id="mine")]
        texts: dict[tuple[int, int], str] = {}
        ends: list[tuple[int, int]] = []
        async for part in service.stub.GenerateBatch(pb.GenerateBatchRequest(requests=requests)):
            place = (part.request_index, part.response.index)
            texts[place] = texts.get(place, "") + part.response.text
            if part.response.finish_reason:
                ends.append(place)
        assert texts == {(0, 0): "bcd", (1, 0): "yz", (1, 1): "yz", (2, 0): "B"}
        assert sorted(ends) == sorted(texts)
        for bad in ([], [short("a", 1), short("", 1)], [short("a", 1)] * 129):
            call = service.stub.GenerateBatch(pb.GenerateBatchRequest(requests=bad))
            assert (await status_of(call))[0] == grpc.StatusCode.INVALID_ARGUMENT
        await until(service.is_idle)

    run(body, delay=0.0)


def test_cancelled_batch_leaves_nothing_behind() -> None:
    async def body(service: Service) -> None:
        requests = pb.GenerateBatchRequest(requests=[long_request() for _ in range(6)])
        call = service.stub.GenerateBatch(requests)
        await anext(aiter(call))
        call.cancel()
        await until(service.is_idle)

    run(body, delay=0.005)


def test_models_are_listed() -> None:
    async def body(service: Service) -> None:
        models = (await service.stub.ListModels(pb.ListModelsRequest())).models
        assert [model.name for model in models] == ["bytes"]
        assert models[0] == await service.stub.GetModel(pb.GetModelRequest())

    run(body, delay=0.0)

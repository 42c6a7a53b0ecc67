"""Whose request it is: aborts do not cross keys, turns and limits go by key."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from swiftjax.cli.listening import make_quota
from swiftjax.engine.constraint import Constraint
from swiftjax.engine.grammar import Grammar
from swiftjax.engine.request import Request, StreamOutput
from swiftjax.engine.served_tokens import owner_of
from swiftjax.serving.caller import set_caller
from swiftjax.serving.keys import KeyEntry, KeyRing
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.quota import Quota
from tests.serving.harness import long_request, status_of, until
from tests.serving.http.harness import ADMIN_KEY, KEY, HttpService, make_keys, run
from tests.serving.test_gateway import ask

OTHER_KEY = "key-of-another"
KEYS = make_keys(KeyEntry(KEY), KeyEntry(OTHER_KEY), KeyEntry(ADMIN_KEY, True))


def limit(service: HttpService, quota: Quota) -> None:
    """Let every transport of a server count."""
    listeners = service.listeners
    assert listeners.http is not None
    for holder in (listeners.http._routes, listeners.grpc._service, listeners.grpc._gateway):
        holder.served = holder.served._replace(quota=quota)  # type: ignore[union-attr]


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata that sends a key."""
    return (("authorization", f"Bearer {key}"),)


def test_an_abort_ends_nothing_of_another_key() -> None:
    async def body(service: HttpService) -> None:
        async with grpc.aio.insecure_channel(service.listeners.grpc.address) as channel:
            gateway = vllm_grpc.VllmEngineStub(channel)
            ours = pb_grpc.GenerationServiceStub(channel)
            request = ask("a", request_id="mine", ignore_eos=True)
            mine = aiter(gateway.Generate(request, metadata=bearer(KEY)))
            theirs = ours.Generate(long_request(request_id="theirs"), metadata=bearer(OTHER_KEY))
            await anext(mine)
            await anext(aiter(theirs))
            for key, ids, left in ((OTHER_KEY, ["mine"], 2), (KEY, ["theirs", "mine"], 1)):
                await gateway.Abort(vllm.AbortRequest(request_ids=ids), metadata=bearer(key))
                num_steps = service.num_steps
                await until(lambda past=num_steps + 3: service.num_steps >= past)
                assert service.engine.stats().num_running == left
            assert [r async for r in mine][-1].complete.finish_reason == "abort"
            abort = vllm.AbortRequest(request_ids=["theirs"])
            await gateway.Abort(abort, metadata=bearer(ADMIN_KEY))
            await until(service.is_idle)

    run(body, keys=KEYS, delay=0.005)


def test_an_id_that_is_in_use_stays_with_whom_has_it() -> None:
    async def body(service: HttpService) -> None:
        async with grpc.aio.insecure_channel(service.listeners.grpc.address) as channel:
            gateway = vllm_grpc.VllmEngineStub(channel)
            request = ask("a", request_id="mine", ignore_eos=True)
            mine = gateway.Generate(request, metadata=bearer(KEY))
            await anext(aiter(mine))
            code, _ = await status_of(gateway.Generate(request, metadata=bearer(OTHER_KEY)))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            abort = vllm.AbortRequest(request_ids=["mine"])
            await gateway.Abort(abort, metadata=bearer(OTHER_KEY))
            num_steps = service.num_steps
            await until(lambda: service.num_steps >= num_steps + 3)
            await gateway.Abort(abort, metadata=bearer(KEY))
            await until(service.is_idle)
            mine.cancel()

    run(body, keys=KEYS, delay=0.005)


def test_who_names_the_id_of_another_while_a_grammar_is_compiled_cannot_abort_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(service: HttpService) -> None:
        has_begun, go_on = threading.Event(), threading.Event()
        compile = service.engine._grammars.compile

        def slowly(constraint: Constraint) -> Grammar:
            has_begun.set()
            go_on.wait(5)
            return compile(constraint)

        monkeypatch.setattr(service.engine._grammars, "compile", slowly)
        async with grpc.aio.insecure_channel(service.listeners.grpc.address) as channel:
            gateway = vllm_grpc.VllmEngineStub(channel)
            ours = pb_grpc.GenerationServiceStub(channel)
            theirs = ours.Generate(long_request(request_id="theirs"), metadata=bearer(OTHER_KEY))
            await anext(aiter(theirs))
            request = ask("a", request_id="theirs", regex="b")
            same = asyncio.create_task(status_of(gateway.Generate(request, metadata=bearer(KEY))))
            await until(has_begun.is_set)
            abort = vllm.AbortRequest(request_ids=["theirs"])
            await gateway.Abort(abort, metadata=bearer(KEY))
            num_steps = service.num_steps
            await until(lambda: service.num_steps >= num_steps + 3)
            assert service.engine.stats().num_running == 1
            go_on.set()
            assert (await same)[0] == grpc.StatusCode.INVALID_ARGUMENT
            theirs.cancel()
            await until(service.is_idle)

    run(body, keys=KEYS, delay=0.005)


def test_turns_go_by_key_and_by_the_clients_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(service: HttpService) -> None:
        seen: list[Request] = []
        submit = service.engine._link.submit
        monkeypatch.setattr(service.engine._link, "submit", lambda r: (seen.append(r), submit(r)))
        stop = pb.StopOptions(max_new_tokens=1)
        async with grpc.aio.insecure_channel(service.listeners.grpc.address) as channel:
            ours = pb_grpc.GenerationServiceStub(channel)
            gateway = vllm_grpc.VllmEngineStub(channel)
            for call in (
                ours.Generate(pb.GenerateRequest(text="a", stop=stop), metadata=bearer(KEY)),
                gateway.Generate(ask("a", max_tokens=1), metadata=bearer(KEY)),
                ours.Generate(
                    pb.GenerateRequest(text="a", stop=stop, client_id="b"), metadata=bearer(KEY)
                ),
            ):
                assert (await status_of(call))[0] == grpc.StatusCode.OK
        await service.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        name = KEYS.check(f"Bearer {KEY}".encode()).name
        # Another key that names the same client cannot use up its turns.
        assert sorted(r.options.client_id for r in seen) == [name, name, name, f"{name}/b"]

    run(body, keys=KEYS)


def test_a_key_has_only_so_many_requests_at_a_time() -> None:
    async def body(service: HttpService) -> None:
        limit(service, Quota(2))
        async with grpc.aio.insecure_channel(service.listeners.grpc.address) as channel:
            ours = pb_grpc.GenerationServiceStub(channel)
            gateway = vllm_grpc.VllmEngineStub(channel)
            running = [ours.Generate(long_request(), metadata=bearer(KEY)) for _ in range(2)]
            for call in running:
                await anext(aiter(call))
            for more in (
                ours.Generate(long_request(), metadata=bearer(KEY)),
                gateway.Generate(ask("a"), metadata=bearer(KEY)),
            ):
                assert (await status_of(more))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
            error = await service.refused("/v1/completions", {"prompt": "a"}, 429)
            assert "has 2 answers" in error["message"]
            stop = pb.StopOptions(max_new_tokens=1)
            short = pb.GenerateRequest(text="a", stop=stop)
            for n, code in ((2, grpc.StatusCode.OK), (3, grpc.StatusCode.INVALID_ARGUMENT)):
                short.sampling.n = n
                call = ours.Generate(short, metadata=bearer(OTHER_KEY))
                assert (await status_of(call))[0] == code
            short.ClearField("sampling")
            batch = pb.GenerateBatchRequest(requests=[short] * 3)
            call = ours.GenerateBatch(batch, metadata=bearer(OTHER_KEY))
            assert (await status_of(call))[0] == grpc.StatusCode.INVALID_ARGUMENT
            others = ours.Generate(short, metadata=bearer(OTHER_KEY))
            assert (await status_of(others))[0] == grpc.StatusCode.OK
            for call in running:
                call.cancel()
            await until(service.is_idle)
            await service.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1})
            for more in ({"prompt": ["a"] * 3}, {"prompt": ["a"] * 2, "n": 2}):
                error = await service.refused("/v1/completions", more, 400)
                assert f"{len(more['prompt']) * more.get('n', 1)} answers" in error["message"]
            await until(service.is_idle)
            told = (await service.client.get("/metrics")).text
            assert 'swiftjax_shed_total{model_name="bytes",reason="key_limit"} 3.0' in told

    run(body, keys=KEYS, delay=0.005)


NUM_CALLS = 5


def note_steps(service: HttpService) -> dict[str, list[int]]:
    """Steps from the arrival of a request at the engine to its end, by whose it is."""
    served, begun, spans = service.core.scheduler.served, dict[str, list[int]](), {}
    join, leave = served.join, served.leave

    def noted_join(client_id: str) -> None:
        begun.setdefault(owner_of(client_id), []).append(service.num_steps)
        join(client_id)

    def noted_leave(client_id: str) -> None:
        owner = owner_of(client_id)
        # (Whose requests come one after the other end in that order.)
        spans.setdefault(owner, []).append(service.num_steps - begun[owner].pop(0))
        leave(client_id)

    served.join, served.leave = noted_join, noted_leave  # type: ignore[method-assign]
    return spans


def test_one_key_cannot_fill_the_queue_and_waits_for_its_turn() -> None:
    rows, queue, length = 2, 64, 10
    stop = pb.StopOptions(max_new_tokens=length, ignore_eos=True)
    request = pb.GenerateRequest(text="a", stop=stop)

    async def flood(ours: pb_grpc.GenerationServiceStub, seen: Counter[grpc.StatusCode]) -> None:
        while True:
            seen[code := (await status_of(ours.Generate(request, metadata=bearer(KEY))))[0]] += 1
            await asyncio.sleep(0.0 if code == grpc.StatusCode.OK else 0.1)

    async def body(service: HttpService) -> None:
        quota = make_quota(None, queue, KEYS, rows)
        assert quota is not None
        limit(service, quota)
        spans = note_steps(service)
        seen = Counter[grpc.StatusCode]()
        async with grpc.aio.insecure_channel(service.listeners.grpc.address) as channel:
            ours = pb_grpc.GenerationServiceStub(channel)
            floods = [asyncio.create_task(flood(ours, seen)) for _ in range(queue)]
            try:
                await until(lambda: seen[grpc.StatusCode.RESOURCE_EXHAUSTED] >= queue // 2)
                for _ in range(NUM_CALLS):
                    call = ours.Generate(request, metadata=bearer(OTHER_KEY))
                    assert (await status_of(call))[0] == grpc.StatusCode.OK
                [mine] = [mine for mine in spans.values() if len(mine) == NUM_CALLS]
                # Until a row is free and its own answer has ended: 20, and some to spare. The
                # whole queue takes 160.
                assert max(mine) <= 40
            finally:
                for task in floods:
                    task.cancel()
                await asyncio.wait(floods)
            await until(service.is_idle)

    run(body, keys=KEYS, delay=0.005, policy="fair", max_num_seqs=rows, max_queue_len=queue)


def test_a_key_that_is_alone_has_the_whole_queue() -> None:
    ring = make_keys(KeyEntry(KEY), KeyEntry(KEY, True))
    assert not ring.has_several and KEYS.has_several
    quota = make_quota(None, 2, ring, 8)
    assert quota is not None and make_quota(1, 2, KeyRing(), 8) is None

    async def answers() -> AsyncGenerator[StreamOutput, None]:
        return
        yield

    async def main() -> None:
        set_caller(ring.check(f"Bearer {KEY}".encode()))
        assert not [output async for output in quota.watch(answers(), 16)]

    asyncio.run(main())

"""VllmEngine as the gateway calls it: prompts of tokens, unset fields, aborts, the tokenizer."""

import hashlib
import io
import json
import zipfile

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc
from tokenizers import Tokenizer

from swiftjax.serving.gateway import vllm_service
from swiftjax.serving.grpc_server import GrpcServer
from tests.serving.harness import Service, status_of, until
from tests.serving.test_cancel import run


def stub(service: Service) -> pb_grpc.VllmEngineStub:
    """The gateway's side."""
    return pb_grpc.VllmEngineStub(service.channel)


def ask(text: str, *, stream: bool = True, request_id: str = "", **params: object):  # type: ignore[no-untyped-def]
    """A request of token ids with these sampling parameters."""
    tokenized = pb.TokenizedInput(original_text=text, input_ids=text.encode())
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=tokenized,
        stream=stream,
        sampling_params=pb.SamplingParams(**params),  # type: ignore[arg-type]
    )


async def answers(service: Service, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """All messages of an answer."""
    return [response async for response in stub(service).Generate(request)]


def test_streamed_and_whole_answers() -> None:
    async def body(service: Service) -> None:
        *chunks, last = await answers(service, ask("a", max_tokens=3))
        assert [i for r in chunks for i in r.chunk.token_ids] == [98, 99, 100]
        assert not last.complete.output_ids and last.complete.finish_reason == "length"
        [whole] = await answers(service, ask("a", max_tokens=3, stream=False))
        assert list(whole.complete.output_ids) == [98, 99, 100]
        for end in (last.complete, whole.complete):
            assert (end.prompt_tokens, end.completion_tokens, end.index) == (1, 3, 0)
        two = await answers(service, ask("a", max_tokens=2, stream=False, n=2))
        assert sorted(r.complete.index for r in two) == [0, 1]

    run(body, delay=0.0)


def test_unset_fields_are_the_contracts_defaults() -> None:
    """Zero top_p, repetition_penalty and n mean one; without max_tokens the context ends it."""

    async def body(service: Service) -> None:
        configs = []
        submit = service.engine._link.submit
        service.engine._link.submit = lambda r: (configs.append(r.generation), submit(r))  # type: ignore
        [whole] = await answers(service, ask("a", stream=False, ignore_eos=True))
        assert whole.complete.completion_tokens == 63
        [config] = configs
        assert (config.temperature, config.top_p, config.n) == (1.0, 1.0, 1)
        assert (config.repetition_penalty, config.top_k, config.seed) == (1.0, 0, None)
        await answers(
            service, ask("a", seed=-1, max_tokens=1, temperature=0.0, top_k=5, logprobs=-1)
        )
        config = configs[-1]
        assert (config.seed, config.temperature) == (2**64 - 1, 0.0)
        assert (config.top_k, config.logprobs) == (5, 20)

    run(body, delay=0.0, max_model_len=64)


def test_stops_and_scores() -> None:
    async def body(service: Service) -> None:
        [whole] = await answers(service, ask("a", stream=False, stop=["d"], max_tokens=9))
        end = whole.complete
        assert (end.finish_reason, end.matched_stop_str) == ("stop", "d")
        [whole] = await answers(service, ask("a", stream=False, stop_token_ids=[100], logprobs=1))
        end = whole.complete
        assert (end.finish_reason, end.matched_token_id) == ("stop", 100)
        assert list(end.output_ids) == list(end.output_logprobs.token_ids) == [98, 99, 100]
        assert list(end.output_logprobs.token_logprobs) == [-0.5] * 3
        kept = ask("abcdef", stream=False, truncate_prompt_tokens=2, max_tokens=1)
        [whole] = await answers(service, kept)
        assert whole.complete.prompt_tokens == 2

    run(body, delay=0.0)


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": "{"},
        {"regex": "("},
        {"structural_tag": "{}"},
        {"choice": pb.ChoiceConstraint()},
        {"top_p": 2.0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"n": 10**6},
        {"logit_bias": {99999999: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logprobs": 21},
        {"stop": ["x"] * 17},
        {"stop": [""]},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_bad_values_are_refused(params: dict[str, object]) -> None:
    async def body(service: Service) -> None:
        code, _ = await status_of(stub(service).Generate(ask("a", **params)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        for request in (pb.GenerateRequest(), ask(""), ask("a" * 5000)):
            code, _ = await status_of(stub(service).Generate(request))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
        [whole] = await answers(service, ask("a", stream=False, max_tokens=10**9, stop=["c"]))
        assert list(whole.complete.output_ids) == [98, 99]

    run(body, delay=0.0)


def test_abort_ends_the_answer_and_frees_its_pages() -> None:
    async def body(service: Service) -> None:
        call = stub(service).Generate(ask("a", request_id="mine", ignore_eos=True))
        responses = aiter(call)
        await anext(responses)
        await stub(service).Abort(pb.AbortRequest(request_ids=["unknown", "mine"]))
        rest = [response async for response in responses]
        assert rest[-1].complete.finish_reason == "abort"
        await until(service.is_idle)
        assert await call.code() == grpc.StatusCode.OK

    run(body, delay=0.005)


def test_tokenizer_is_whole_and_has_the_template() -> None:
    async def body(service: Service) -> None:
        request = common_pb2.GetTokenizerRequest()
        parts = [part async for part in stub(service).GetTokenizer(request)]
        data = b"".join(part.data for part in parts)
        assert [part.sha256 for part in parts[:-1]] == [""] * (len(parts) - 1)
        assert parts[-1].sha256 == hashlib.sha256(data).hexdigest()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
            assert tokenizer.encode("ab").ids == [97, 98]
            config = json.loads(archive.read("tokenizer_config.json"))
            assert "role" in config["chat_template"] and config["eos_token"] == "<end>"
            assert json.loads(archive.read("config.json"))["eos_token_id"] == [256]

    run(body, delay=0.0)


def test_tokenizer_that_failed_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(service: Service) -> None:
        request = common_pb2.GetTokenizerRequest()
        with monkeypatch.context() as broken:
            broken.setattr(vllm_service, "make_bundle", lambda *_: 1 / 0)
            code, details = await status_of(stub(service).GetTokenizer(request))
            assert code == grpc.StatusCode.INTERNAL and "division" not in details
        assert (await status_of(stub(service).GetTokenizer(request)))[0] == grpc.StatusCode.OK

    run(body, delay=0.0)


def test_what_the_gateway_asks_of_a_server() -> None:
    async def body(service: Service) -> None:
        gateway = stub(service)
        assert (await gateway.HealthCheck(pb.HealthCheckRequest())).healthy
        info = await gateway.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.max_context_length) == ("bytes", 4096)
        assert info.is_generation and list(info.eos_token_ids) == [256]
        server = await gateway.GetServerInfo(pb.GetServerInfoRequest())
        assert server.server_type == "vllm-grpc" and server.block_size == 4
        [load] = (await gateway.GetLoads(pb.GetLoadsRequest())).loads
        assert load.num_total_reqs == 0 and load.max_total_num_tokens == 4 * 4096
        assert (await gateway.FlushCache(common_pb2.FlushCacheRequest())).success
        code, _ = await status_of(gateway.Embed(pb.EmbedRequest()))
        assert code == grpc.StatusCode.UNIMPLEMENTED
        events = gateway.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        assert (await status_of(events))[0] == grpc.StatusCode.UNIMPLEMENTED
        await service.server.drain("going away", 0.1)
        assert not (await gateway.HealthCheck(pb.HealthCheckRequest())).healthy
        assert (await gateway.GetServerInfo(pb.GetServerInfoRequest())).is_paused

    run(body, delay=0.0)


def test_unhealthy_until_the_model_is_loaded() -> None:
    async def body(service: Service) -> None:
        server = GrpcServer("127.0.0.1", 0)
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            gateway = pb_grpc.VllmEngineStub(channel)
            assert not (await gateway.HealthCheck(pb.HealthCheckRequest())).healthy
            for call in (
                gateway.GetModelInfo(pb.GetModelInfoRequest()),
                gateway.Generate(ask("a")),
            ):
                assert (await status_of(call))[0] == grpc.StatusCode.UNAVAILABLE
        await server.stop()

    run(body, delay=0.0)

"""Endless text asked for over gRPC and HTTP: options on the wire, limits, refusals."""

import asyncio
from typing import Any

import grpc
import pytest

from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.streaming import Streaming
from swiftjax.serving.options import read_generation_config, write_options
from swiftjax.serving.proto import swiftjax_pb2 as pb
from tests.serving.harness import join, make_core, serving, status_of, until
from tests.serving.http.harness import HttpService, run

ASKED = {"sink": 2, "window": 20}
LONG = "a" * 100
SIZES: dict[str, Any] = {"max_model_len": 64, "num_pages": 16}  # pages of 4: one sequence's


@pytest.mark.parametrize("streaming", [None, Streaming(), Streaming(sink=0, window=5, buffer=9)])
def test_options_survive_the_wire(streaming: Streaming | None) -> None:
    request = pb.GenerateRequest()
    write_options(GenerationConfig(streaming=streaming), request)
    sent = pb.GenerateRequest.FromString(request.SerializeToString())
    assert read_generation_config(sent).streaming == streaming
    sent = pb.GenerateRequest(streaming=pb.StreamingOptions(window=7))
    assert read_generation_config(sent).streaming == Streaming(sink=4, window=7)


def test_over_grpc_prompt_and_answer_may_be_longer_than_the_model() -> None:
    async def main() -> None:
        async with serving(make_core(streams=True, **SIZES)) as service:
            stop = pb.StopOptions(max_new_tokens=150, ignore_eos=True)
            streaming = pb.StreamingOptions(**ASKED)
            for prompt in ({"text": LONG}, {"token_ids": pb.TokenIds(ids=LONG.encode())}):
                request = pb.GenerateRequest(stop=stop, streaming=streaming, **prompt)
                _, last = await join(service.stub.Generate(request))
                assert (last.usage.prompt_tokens, last.usage.output_tokens) == (100, 150)
            await until(service.is_idle)
            request.ClearField("streaming")
            code, details = await status_of(service.stub.Generate(request))
            assert code == grpc.StatusCode.INVALID_ARGUMENT and "max_model_len is 64" in details
            wide = pb.GenerateRequest(text="a", streaming=pb.StreamingOptions(window=100))
            code, details = await status_of(service.stub.Generate(wide))
            assert code == grpc.StatusCode.INVALID_ARGUMENT and "lower the window by" in details

    asyncio.run(main())


def test_over_http_too() -> None:
    async def body(service: HttpService) -> None:
        asked = {"max_tokens": 150, "ignore_eos": True, "streaming": ASKED}
        for path, prompt in (
            ("/v1/completions", {"prompt": LONG}),
            ("/v1/completions", {"prompt": list(LONG.encode())}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ):
            answer = await service.post(path, asked | prompt)
            assert answer["usage"]["completion_tokens"] == 150
        for bad in ({"window": 0}, {"sink": -1}, {"length": 5}, {"window": 100}):
            error = await service.refused("/v1/completions", {"prompt": "a", "streaming": bad})
            assert any(word in error["message"] for word in ("streaming", "lower the window"))
        error = await service.refused("/v1/completions", asked | {"prompt": "a", "n": 2})
        assert "n is 2; with streaming it must be 1" in error["message"]

    run(body, streams=True, **SIZES)


def test_a_server_without_streaming_says_how_to_start_it() -> None:
    async def body(service: HttpService) -> None:
        error = await service.refused("/v1/completions", {"prompt": "a", "streaming": {}})
        assert "start it with --streaming" in error["message"]
        assert service.num_steps == 0

    run(body)

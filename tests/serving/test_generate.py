"""Generate, Tokenize, Detokenize and GetModel: right answers and refusals."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from swiftjax import __version__
from swiftjax.engine.generation import MAX_STOP_BYTES, MAX_STOP_STRINGS
from swiftjax.serving.proto import swiftjax_pb2 as pb
from tests.serving.harness import (
    END_ID,
    VOCAB_SIZE,
    Service,
    join,
    make_core,
    serving,
    status_of,
    until,
)
from tests.stalls import tried_again_after_stalls

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def run(body: Callable[[Service], Awaitable[None]], **core: Any) -> None:
    """Run a test against a fresh server."""

    async def main() -> None:
        async with serving(make_core(**core)) as service:
            await body(service)

    asyncio.run(main())


def request(**fields: Any) -> pb.GenerateRequest:
    """A request for five tokens, unless its stop options say otherwise."""
    fields.setdefault("stop", pb.StopOptions(max_new_tokens=5))
    return pb.GenerateRequest(**fields)


@pytest.mark.parametrize(
    ("prompt", "text", "num_prompt"),
    [
        ({"text": "a"}, "bcdef", 1),
        ({"token_ids": pb.TokenIds(ids=[65, 66])}, "CDEFG", 2),
        (
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="1")])},
            "<=>?@",
            len("user:1;"),
        ),
    ],
)
def test_each_kind_of_prompt_is_answered(prompt: Any, text: str, num_prompt: int) -> None:
    async def body(service: Service) -> None:
        answer, last = await join(service.stub.Generate(request(request_id="mine", **prompt)))
        assert answer == text
        assert last.request_id == "mine"
        assert last.finish_reason == pb.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.output_tokens) == (num_prompt, 5)
        assert last.WhichOneof("matched_stop") is None

    run(body)


def test_end_of_sequence_ends_the_answer_and_is_not_shown() -> None:
    async def body(service: Service) -> None:
        ids = pb.TokenIds(ids=[END_ID - 3])
        answer, last = await join(service.stub.Generate(pb.GenerateRequest(token_ids=ids)))
        # The two bytes before the end are no character.
        assert answer == "\ufffd\ufffd"
        assert last.finish_reason == pb.FINISH_REASON_STOP
        assert last.stop_token_id == END_ID
        assert last.usage.output_tokens == 3

    run(body)


def test_b006_stop_strings_over_grpc() -> None:
    async def body(service: Service) -> None:
        stop = pb.StopOptions(strings=["ef"], max_new_tokens=50)
        answer, last = await join(service.stub.Generate(request(text="a", stop=stop)))
        assert (answer, last.finish_reason) == ("bcd", pb.FINISH_REASON_STOP)
        assert last.stop_string == "ef"
        stop.include_stop_string = True
        assert (await join(service.stub.Generate(request(text="a", stop=stop))))[0] == "bcdef"

        refused = request(text="a", stop=pb.StopOptions(strings=[""]))
        code, details = await status_of(service.stub.Generate(refused))
        assert code == INVALID and "stop strings must be non-empty" in details
        await until(service.is_idle)

    run(body)


@pytest.mark.parametrize(
    "bad",
    [
        {"token_ids": pb.TokenIds(ids=[VOCAB_SIZE])},
        {"token_ids": pb.TokenIds(ids=[-1])},
        {"token_ids": pb.TokenIds(ids=[2**40])},
        {"token_ids": pb.TokenIds(ids=[1, 2, -(2**63)])},
        {"token_ids": pb.TokenIds(ids=[])},
        {"text": ""},
        {"text": "a", "stop": pb.StopOptions(token_ids=[VOCAB_SIZE])},
        {"text": "a", "stop": pb.StopOptions(token_ids=[-1])},
        {"text": "a", "stop": pb.StopOptions(token_ids=[2**40])},
    ],
)
def test_b019_ids_outside_the_vocabulary(bad: Any) -> None:
    async def body(service: Service) -> None:
        code, details = await status_of(service.stub.Generate(request(**bad)))
        assert code == INVALID, details
        assert service.num_steps == 0 and service.is_idle()
        assert (await join(service.stub.Generate(request(text="a"))))[0] == "bcdef"

    run(body)


@pytest.mark.parametrize("count", [2**31 - 1, 2**31 - 48])
def test_b069_huge_max_new_tokens_ends_at_the_context(count: int) -> None:
    async def body(service: Service) -> None:
        stop = pb.StopOptions(max_new_tokens=count, ignore_eos=True)
        ids = pb.TokenIds(ids=[1] * 100)
        _, last = await join(service.stub.Generate(request(token_ids=ids, stop=stop)))
        assert last.finish_reason == pb.FINISH_REASON_LENGTH
        assert last.usage.output_tokens == 512 - 100

    run(body, max_model_len=512)


@pytest.mark.parametrize(
    "bad",
    [
        {"stop": pb.StopOptions(max_new_tokens=10**18)},
        {"stop": pb.StopOptions(max_new_tokens=0)},
        {"stop": pb.StopOptions(max_new_tokens=-1)},
        {"stop": pb.StopOptions(strings=["x"] * 10**6)},
        {"stop": pb.StopOptions(strings=["x" * (10 * 2**20)])},
        {"stop": pb.StopOptions(strings=["x"] * (MAX_STOP_STRINGS + 1))},
        {"stop": pb.StopOptions(strings=["é" * (MAX_STOP_BYTES // 2 + 1)])},
        {"stop": pb.StopOptions(token_ids=[1] * 10**6)},
        {"token_ids": pb.TokenIds(ids=[1] * 512)},
        {"token_ids": pb.TokenIds(ids=[1] * 10**6)},
        {"sampling": pb.SamplingOptions(top_k=-2)},
        {"sampling": pb.SamplingOptions(top_k=2**62)},
        {"sampling": pb.SamplingOptions(top_p=1.1)},
        {"sampling": pb.SamplingOptions(temperature=float("nan"))},
        {"sampling": pb.SamplingOptions(temperature=float("inf"))},
        {"sampling": pb.SamplingOptions(temperature=-1)},
        {"time_limit": Duration(seconds=-1)},
        {"time_limit": Duration()},
        {"request_id": "x" * 129},
        {"chat": pb.Chat()},
        {"chat": pb.Chat(messages=[pb.ChatMessage(content="no role")])},
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="user")] * 10**6)},
        {"text": "x" * 512},
    ],
)
@tried_again_after_stalls
def test_b069_values_out_of_range_are_refused_at_once(bad: Any) -> None:
    fields = bad if "token_ids" in bad or "chat" in bad else {"text": "a"} | bad

    async def body(service: Service) -> None:
        started = time.monotonic()
        code, details = await status_of(service.stub.Generate(request(**fields)))
        assert code == INVALID, details
        assert time.monotonic() - started < 1.0
        assert len(details) <= 500
        assert service.num_steps == 0 and service.is_idle()

    run(body, max_model_len=512)


def test_b069_every_64_bit_seed_is_taken() -> None:
    async def body(service: Service) -> None:
        for seed in (0, 1, 2**63, 2**64 - 1):
            sampling = pb.SamplingOptions(seed=seed, temperature=1)
            await join(service.stub.Generate(request(text="a", sampling=sampling)))

    run(body)
    with pytest.raises(ValueError):
        pb.SamplingOptions(seed=2**64)


def test_no_prompt_and_unknown_model_are_refused() -> None:
    async def body(service: Service) -> None:
        stub = service.stub
        for call in (stub.Generate(request()), stub.Tokenize(pb.TokenizeRequest())):
            code, details = await status_of(call)
            assert code == INVALID and "no prompt" in details
        for call in (
            stub.Generate(request(text="a", model="other")),
            stub.Tokenize(pb.TokenizeRequest(text="a", model="other")),
            stub.Detokenize(pb.DetokenizeRequest(token_ids=[1], model="other")),
        ):
            code, details = await status_of(call)
            assert code == grpc.StatusCode.NOT_FOUND
            assert "'other'" in details and "'bytes'" in details
        assert (await join(stub.Generate(request(text="a", model="bytes"))))[0] == "bcdef"

    run(body)


def test_b041_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    async def body(service: Service) -> None:
        ids = pb.TokenIds(ids=[1] * 100)
        stop = pb.StopOptions(max_new_tokens=100)
        code, details = await status_of(service.stub.Generate(request(token_ids=ids, stop=stop)))
        assert code == INVALID and "128" in details
        assert (await join(service.stub.Generate(request(text="a"))))[0] == "bcdef"

    run(body, num_pages=32, max_model_len=512)


def test_request_id_in_use_is_refused() -> None:
    async def body(service: Service) -> None:
        stop = pb.StopOptions(max_new_tokens=1000, ignore_eos=True)
        first = service.stub.Generate(request(text="a", request_id="same", stop=stop))
        await anext(aiter(first))
        code, details = await status_of(service.stub.Generate(request(text="a", request_id="same")))
        assert code == INVALID and "in use" in details
        first.cancel()

    run(body, delay=0.01)


def test_full_queue_is_resource_exhausted_with_a_time_to_wait() -> None:
    async def body(service: Service) -> None:
        stop = pb.StopOptions(max_new_tokens=1000, ignore_eos=True)
        calls = [service.stub.Generate(request(text="a", stop=stop))]
        await anext(aiter(calls[0]))  # it runs; only now is the whole queue free for others
        calls += [service.stub.Generate(request(text="a", stop=stop)) for _ in range(2)]
        await until(lambda: service.engine.stats().num_waiting == 2)
        refused = service.stub.Generate(request(text="a"))
        code, _ = await status_of(refused)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("grpc-retry-pushback-ms", "1000") in tuple(await refused.trailing_metadata())
        for call in calls:
            call.cancel()

    run(body, delay=0.01, max_num_seqs=1, max_queue_len=2)


@tried_again_after_stalls
def test_time_limit_ends_with_what_there_is() -> None:
    async def body(service: Service) -> None:
        stop = pb.StopOptions(max_new_tokens=4000, ignore_eos=True)
        limit = Duration(nanos=200_000_000)
        started = time.monotonic()
        answer, last = await join(
            service.stub.Generate(request(text="a", stop=stop, time_limit=limit))
        )
        assert 0.15 < time.monotonic() - started < 2.0
        assert last.finish_reason == pb.FINISH_REASON_TIME_LIMIT
        assert answer.startswith("bcd") and last.usage.output_tokens >= 3

    run(body, delay=0.01)


def test_tokenize_and_detokenize() -> None:
    async def body(service: Service) -> None:
        stub = service.stub
        response = await stub.Tokenize(pb.TokenizeRequest(text="aé"))
        assert list(response.token_ids) == [0x61, 0xC3, 0xA9]
        chat = pb.Chat(messages=[pb.ChatMessage(role="u", content="x")])
        response = await stub.Tokenize(pb.TokenizeRequest(chat=chat))
        assert bytes(response.token_ids) == b"u:x;"
        ids = [0x61, END_ID, 0xC3, 0xA9]
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "aé"
        shown = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
        assert (await stub.Detokenize(shown)).text == "a<end>é"
        assert (await stub.Detokenize(pb.DetokenizeRequest())).text == ""
        for bad in (-1, VOCAB_SIZE, 2**40):
            code, details = await status_of(
                stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, bad]))
            )
            assert code == INVALID and str(bad) in details

    run(body)


def test_get_model() -> None:
    async def body(service: Service) -> None:
        model = await service.stub.GetModel(pb.GetModelRequest())
        assert model == pb.GetModelResponse(
            name="bytes",
            family="llama",
            max_model_len=4096,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[END_ID],
            dtype="float32",
            has_chat_template=True,
            server_version=__version__,
        )
        assert not model.HasField("bos_token_id")

    run(body)

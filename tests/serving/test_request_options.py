"""Priority, client, session, salt and time limit: from a message to the scheduler, and refusals."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from swiftjax.engine.request import RequestOptions
from swiftjax.errors import InvalidRequestError
from swiftjax.serving.options import read_request_options, write_request_options
from swiftjax.serving.proto import swiftjax_pb2 as pb
from tests.serving.harness import Service, join, long_request, make_core, serving, status_of, until

TWICE = [pb.TokenBias(token_id=5, bias=bias) for bias in (1.0, 2.0)]
OPTIONS = RequestOptions(
    priority=-3, client_id="lab 7", session_id="s", cache_salt="☃", time_limit=1.5
)


@pytest.mark.parametrize("options", [OPTIONS, RequestOptions(), RequestOptions(time_limit=1e9)])
def test_options_survive_the_wire(options: RequestOptions) -> None:
    request = pb.GenerateRequest()
    write_request_options(options, request)
    sent = pb.GenerateRequest.FromString(request.SerializeToString())
    assert read_request_options(sent) == options


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"priority": 2**31}, "priority is 2147483648; it must lie in"),
        ({"client_id": "x" * 129}, "client_id has 129 characters; at most 128 are taken"),
        ({"session_id": "a\nb"}, r"session_id contains the control character '\n': leave it out"),
        ({"cache_salt": "\x00"}, r"cache_salt contains the control character '\x00'"),
        ({"request_id": "a\x1b[31m"}, r"request_id contains the control character '\x1b'"),
        ({"request_id": "a\u2028"}, r"request_id contains the control character '\u2028'"),
        ({"request_id": "x" * 129}, "request_id has 129 characters; at most 128 are taken"),
        ({"time_limit": Duration(seconds=1, nanos=-1)}, "the sign of the seconds"),
        ({"time_limit": Duration(seconds=-1, nanos=5)}, "the sign of the seconds"),
        ({"time_limit": Duration(nanos=10**9)}, "nanos must lie between"),
        ({"time_limit": Duration(seconds=3 * 10**11)}, "time_limit is 300000000000.0; it must"),
        ({"output": pb.OutputOptions(logprobs_mode=7)}, "logprobs_mode is 7; choose one of LOG"),  # type: ignore[arg-type]
        (
            {"sampling": pb.SamplingOptions(logit_bias=TWICE)},
            "logit_bias names token 5 twice",
        ),
        (
            {"sampling": pb.SamplingOptions(bad_words=[pb.TokenIds(ids=[-1])])},
            "an id in a bad word is -1; it must lie in",
        ),
        ({"sampling": pb.SamplingOptions(n=4)}, "n is 4; each choice waits in the queue"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_the_reason(bad: dict[str, Any], message: str) -> None:
    async def main() -> None:
        async with serving(make_core(max_queue_len=3)) as service:
            code, details = await status_of(
                service.stub.Generate(pb.GenerateRequest(text="a", **bad))
            )
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert message in details
            assert service.num_steps == 0 and service.is_idle()

    asyncio.run(main())


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 2e9])
def test_time_limits_are_positive_numbers(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"time_limit is .* positive number of seconds"):
        RequestOptions(time_limit=value)


@pytest.mark.parametrize("value", ["\ud800", "a\x85", "x" * 129])
def test_labels_are_short_texts_without_control_characters(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="client_id"):
        RequestOptions(client_id=value)


async def finish_order(service: Service, *requests: dict[str, Any]) -> list[str]:
    """Which of the requests, sent while one other runs alone, are answered first."""
    done: list[str] = []

    async def ask(request: dict[str, Any]) -> None:
        stop = pb.StopOptions(max_new_tokens=3)
        await join(service.stub.Generate(pb.GenerateRequest(text="a", stop=stop, **request)))
        done.append(request["request_id"])

    first = service.stub.Generate(long_request(client_id="b"))
    await anext(aiter(first))
    tasks = []
    for count, request in enumerate(requests, start=1):
        tasks.append(asyncio.create_task(ask(request)))
        await until(lambda n=count: service.engine.stats().num_waiting == n)
    first.cancel()
    await asyncio.gather(*tasks)
    return done


def test_the_highest_priority_starts_first_over_grpc() -> None:
    async def main() -> None:
        async with serving(make_core(policy="priority", max_num_seqs=1, delay=0.002)) as service:
            order = await finish_order(
                service,
                {"request_id": "low", "priority": -1},
                {"request_id": "none"},
                {"request_id": "high", "priority": 9},
            )
            assert order == ["high", "none", "low"]

    asyncio.run(main())


def test_clients_take_turns_over_grpc() -> None:
    async def main() -> None:
        async with serving(make_core(policy="fair", max_num_seqs=1, delay=0.002)) as service:
            order = await finish_order(
                service,
                {"request_id": "b1", "client_id": "b"},  # its first request has taken the most
                {"request_id": "a1", "client_id": "a"},
            )
            assert order == ["a1", "b1"]

    asyncio.run(main())


def test_usage_counts_cached_tokens_of_equal_salts_only() -> None:
    async def main() -> None:
        async with serving(make_core()) as service:
            stop = pb.StopOptions(max_new_tokens=2)

            async def cached(**fields: Any) -> tuple[int, int]:
                request = pb.GenerateRequest(text="abcdefghijk", stop=stop, **fields)
                _, last = await join(service.stub.Generate(request))
                return last.usage.prompt_tokens, last.usage.cached_tokens

            assert await cached() == (11, 0)
            assert await cached() == (11, 8)  # two full pages of four
            assert await cached(cache_salt="mine") == (11, 0)
            assert await cached(cache_salt="mine") == (11, 8)

    asyncio.run(main())

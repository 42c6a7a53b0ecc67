"""Constrained answers over HTTP and gRPC: each way to ask for them, and what is refused."""

import asyncio
import json

import grpc
import pytest

from swiftjax.engine.constraint import Constraint
from swiftjax.engine.request import GenerationConfig
from swiftjax.serving.options import read_generation_config, write_options
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from tests.serving.harness import status_of
from tests.serving.http.harness import HttpService, Json, run

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BROKEN: list[Json] = [
    {"structured_outputs": {"regex": "ab**"}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": "(?P<x>a)(?P=x)"}},
    {"structured_outputs": {"regex": "a" * 5000}},
    {"structured_outputs": {"json": {"properties": {"foo": "bar"}, "type": "object"}}},
    {"structured_outputs": {"json": {"type": "nope"}}},
    {"structured_outputs": {"grammar": 'x: "a"'}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
    {"structured_outputs": {"regex": "a"}, "min_tokens": 2},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    {"response_format": {"type": "xml"}},
]


def test_b067_broken_constraints_are_400_and_disturb_nobody() -> None:
    async def body(service: HttpService) -> None:
        request = {"prompt": "!", "max_tokens": 60, "stream": True}
        async with service.client.stream("POST", COMPLETE, json=request) as response:
            lines = response.aiter_lines()
            await anext(lines)
            for fields in BROKEN:
                for stream in (False, True):
                    await service.refused(CHAT, {"messages": HI, "stream": stream} | fields)
            deep = (
                b'{"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"json": '
            )
            await service.refused(CHAT, deep + b'{"a":' * 5000 + b"1" + b"}" * 5002)
            text = "".join([line async for line in lines])
        assert text.endswith("data: [DONE]") and '"finish_reason":"length"' in text
        await service.post(COMPLETE, {"prompt": "a", "max_tokens": 1})

    run(body, delay=0.02)


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, Constraint(kind="json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA},
                }
            },
            Constraint(kind="json_schema", text=json.dumps(SCHEMA, separators=(",", ":"))),
        ),
        ({"structured_outputs": {"regex": "[0-9]+"}}, Constraint(kind="regex", text="[0-9]+")),
        (
            {"structured_outputs": {"choice": ["x", "y"]}},
            Constraint(kind="choice", choices=("x", "y")),
        ),
        ({"response_format": {"type": "text"}}, None),
    ],
    ids=str,
)
def test_every_way_to_ask_reaches_the_engine(fields: Json, constraint: Constraint | None) -> None:
    async def body(service: HttpService) -> None:
        seen: list[Constraint | None] = []
        submit = service.engine._link.submit
        service.engine._link.submit = lambda r: (seen.append(r.generation.constraint), submit(r))  # type: ignore
        await service.post(CHAT, {"messages": HI, "max_tokens": 3} | fields)
        await service.post(COMPLETE, {"prompt": "a", "max_tokens": 3} | fields)
        assert seen == [constraint, constraint]

    run(body)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(kind="json_schema", text='{"type": "integer"}'),
        Constraint(kind="json_object"),
        Constraint(kind="regex", text="a|b"),
        Constraint(kind="grammar", text='start: "a"'),
        Constraint(kind="choice", choices=("x", "y")),
        None,
    ],
    ids=str,
)
def test_constraints_over_grpc_and_back(constraint: Constraint | None) -> None:
    request = pb.GenerateRequest()
    write_options(GenerationConfig(constraint=constraint), request)
    again = pb.GenerateRequest.FromString(request.SerializeToString())
    assert read_generation_config(again).constraint == constraint


def test_b067_broken_constraints_over_grpc() -> None:
    async def body(service: HttpService) -> None:
        async with grpc.aio.insecure_channel(service.listeners.grpc.address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            for bad in (
                pb.Constraint(regex="("),
                pb.Constraint(json_schema='{"type": "nope"}'),
                pb.Constraint(grammar='x: "a"'),
                pb.Constraint(choice=pb.Choices()),
                pb.Constraint(regex=""),
            ):
                call = stub.Generate(pb.GenerateRequest(text="a", constraint=bad))
                assert (await status_of(call))[0] == grpc.StatusCode.INVALID_ARGUMENT
        await asyncio.sleep(0)
        assert service.num_steps == 0

    run(body)

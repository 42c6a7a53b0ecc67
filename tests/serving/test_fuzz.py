"""Random requests: whatever comes in, a client's mistake is never the server's failure."""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from swiftjax.serving.proto import swiftjax_pb2 as pb
from tests.serving.harness import VOCAB_SIZE, join, make_core, serving, until

COUNT = 100_000 if os.environ.get("SWIFTJAX_SOAK") == "1" else 3_000
AT_ONCE = 20
MAX_GROWTH = 50 * 2**20
SERVICE = "/swiftjax.v1.GenerationService"
REQUESTS: dict[str, type[Message]] = {
    "Generate": pb.GenerateRequest,
    "GenerateBatch": pb.GenerateBatchRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
    "GetModel": pb.GetModelRequest,
    "ListModels": pb.ListModelsRequest,
}
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
TEXTS = ("", "a", "user", "bytes", "é☃\U0001f9e0", "\x00", "<end>", "x" * 300, "{{ 7 * 7 }}")
INTEGERS = (0, 1, -1, 2, 5, 100, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1, 2**31, 2**32, 2**63 - 1)
DOUBLES = (0.0, 1.0, 0.5, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))


def random_scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    """A value the field can hold, mostly one at an edge."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return rng.choice((*DOUBLES, rng.uniform(-2, 2)))
    value = rng.choice((*INTEGERS, -(2**63), rng.randrange(300)))
    if field.type == FieldDescriptor.TYPE_UINT64:
        return value % 2**64
    return value if field.type == FieldDescriptor.TYPE_INT64 else (value + 2**31) % 2**32 - 2**31


def fill(rng: random.Random, message: Message) -> None:
    """Set about half of the fields, at any depth."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5:
            continue
        if field.is_repeated:
            target = getattr(message, field.name)
            for _ in range(rng.choice((0, 1, 2, 3, 40))):
                if field.message_type is None:
                    target.append(random_scalar(rng, field))
                else:
                    fill(rng, target.add())
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(rng, getattr(message, field.name))
        else:
            setattr(message, field.name, random_scalar(rng, field))


def random_request(rng: random.Random) -> tuple[str, bytes]:
    """A method and what is sent to it: a message, a damaged message or noise."""
    method = rng.choice(("Generate", "Generate", "Generate", *REQUESTS))
    message = REQUESTS[method]()
    fill(rng, message)
    data = message.SerializeToString()
    kind = rng.random()
    if kind < 0.1:
        return method, rng.randbytes(rng.randrange(64))
    if kind < 0.3 and data:
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return method, bytes(damaged[: rng.randrange(len(damaged) + 1)])
    return method, data


async def send(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.StatusCode:
    """The status that the bytes are answered with."""
    try:
        if method.startswith("Generate"):
            async for _ in channel.unary_stream(f"{SERVICE}/{method}")(data, timeout=20):
                pass
        else:
            await channel.unary_unary(f"{SERVICE}/{method}")(data, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def resident_bytes() -> int:
    """Memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.soak
def test_random_requests_never_make_the_server_fail() -> None:
    rng = random.Random(2026)
    seen: dict[grpc.StatusCode, int] = {}

    async def worker(channel: grpc.aio.Channel, requests: list[tuple[str, bytes]]) -> None:
        for method, data in requests:
            status = await send(channel, method, data)
            seen[status] = seen.get(status, 0) + 1
            assert status in ALLOWED, (method, data)

    async def main() -> None:
        async with serving(make_core(max_model_len=64)) as service:
            before = 0
            for start in range(0, COUNT, COUNT // 10):
                requests = [random_request(rng) for _ in range(COUNT // 10)]
                shares = [requests[i::AT_ONCE] for i in range(AT_ONCE)]
                await asyncio.gather(*(worker(service.channel, share) for share in shares))
                if start == 0:
                    before = resident_bytes()
            assert resident_bytes() - before < MAX_GROWTH
            await until(service.is_idle)
            stop = pb.StopOptions(max_new_tokens=3)
            answer, _ = await join(service.stub.Generate(pb.GenerateRequest(text="a", stop=stop)))
            assert answer == "bcd"

    asyncio.run(main())
    # The requests reached what they were meant to: many are fine and many are not.
    assert min(seen[grpc.StatusCode.OK], seen[grpc.StatusCode.INVALID_ARGUMENT]) > COUNT // 20

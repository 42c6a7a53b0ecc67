"""Random requests over HTTP: whatever comes in, a client's mistake is never the server's failure.

Bodies are drawn from the OpenAPI document, with values at the edges and of other types mixed in;
schemathesis draws its own beside them. With those of gRPC they are 5,000 in every run.
"""

import asyncio
import json
import logging
import os
import random
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from swiftjax.serving.http.openapi import make_document
from tests.environments import programs_of
from tests.serving.harness import PATIENCE, VOCAB_SIZE, byte_tokenizer, make_core, until
from tests.serving.http.harness import KEY, HttpService, error_of, serving
from tests.serving.http.test_process import running
from tests.serving.http.test_tools import TEMPLATE as TOOLS_TEMPLATE
from tests.serving.test_fuzz import MAX_GROWTH, TEXTS, resident_bytes

IS_SOAK = os.environ.get("SWIFTJAX_SOAK") == "1"
COUNT = 100_000 if IS_SOAK else 1_900
AT_ONCE = 20
ALLOWED = {200, 400, 404, 429}
DOCUMENT = make_document()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
POSTS = [path for path, operations in DOCUMENT["paths"].items() if "post" in operations]
NUMBERS = (
    0, 1, -1, 2, 5, 0.5, 1.0, 1e-300, 1e300, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1, 2**31, 2**63,
    2**64, 10**30, float("inf"), float("nan"),
)  # fmt: skip
ANYTHING: tuple[Any, ...] = (None, True, [], {}, "text", "5", [[]], {"a": {"b": []}}, "\ud800")


def draw(rng: random.Random, schema: dict[str, Any], depth: int = 0) -> Any:
    """A value of a schema, or now and then of no schema at all."""
    if rng.random() < 0.04 or not schema:
        return rng.choice((*ANYTHING, *NUMBERS))
    if "$ref" in schema:
        return draw(rng, SCHEMAS[schema["$ref"].rpartition("/")[2]], depth)
    if "anyOf" in schema:
        return draw(rng, rng.choice(schema["anyOf"]), depth)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        return draw_object(rng, schema, depth)
    if kind == "array":
        count = rng.choice((0, 1, 1, 2, 3, 40))
        return [draw(rng, schema.get("items", {}), depth + 1) for _ in range(count)]
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", -3), schema.get("maximum", 300)
        return rng.choice((rng.randint(int(low), int(high)), low, high, *NUMBERS))
    return {"string": rng.choice(TEXTS), "boolean": rng.random() < 0.5}.get(kind or "")


def draw_object(rng: random.Random, schema: dict[str, Any], depth: int) -> dict[str, Any]:
    """An object with what is required and some of the rest."""
    required = schema.get("required", ())
    value = {
        name: draw(rng, part, depth + 1)
        for name, part in schema.get("properties", {}).items()
        if name in required or rng.random() < 0.15
    }
    if rng.random() < 0.02:
        value[rng.choice(TEXTS)] = rng.choice(ANYTHING)
    if isinstance(schema.get("additionalProperties"), dict):
        keys = ("0", "97", "-1", "x", str(2**70))
        value |= {rng.choice(keys): draw(rng, schema["additionalProperties"], depth + 1)}
    return value


def random_request(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body: drawn, damaged or noise."""
    path = rng.choice(POSTS)
    operation = DOCUMENT["paths"][path]["post"]
    data = json.dumps(
        draw(rng, operation["requestBody"]["content"]["application/json"]["schema"])
    ).encode()
    kind = rng.random()
    if kind < 0.05:
        return path, rng.randbytes(rng.randrange(64))
    if kind < 0.15:
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return path, bytes(damaged[: rng.randrange(len(damaged) + 1)])
    return path, data


async def noise(service: HttpService, data: bytes) -> None:
    """Bytes that are no HTTP, or nearly; whatever is answered, the server goes on."""
    assert service.listeners.http is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", service.listeners.http.port)
    writer.write(data)
    writer.write_eof()
    try:
        await asyncio.wait_for(reader.read(), PATIENCE)
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.fixture(scope="module")
def schemathesis(tmp_path_factory: pytest.TempPathFactory) -> Iterator["subprocess.Popen[str]"]:
    """The unmodified package at work on a server process, while the other tests run."""
    program = programs_of("schemathesis", "schemathesis>=4.32,<5") / "schemathesis"
    folder = tmp_path_factory.mktemp("schemathesis")
    (folder / "keys").write_text(KEY)
    # Answers of thousands of tokens are asked for, too.
    with running("--keys", folder / "keys", "--step-seconds", 0) as server:
        command = [program, "--no-color", "run", f"{server.http}/openapi.json", "--seed", "1"]
        command += ["--header", f"Authorization: Bearer {KEY}", "--phases", "fuzzing"]
        command += ["--max-examples", "1000" if IS_SOAK else "12", "--checks", "all"]
        # A document cannot say what fields mean together.
        command += ["--exclude-checks", "positive_data_acceptance"]
        process = subprocess.Popen(
            list(map(str, command)), cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        yield process
        process.kill()
        process.communicate()


@pytest.mark.soak
@pytest.mark.usefixtures("schemathesis")
def test_p1_random_requests_never_make_the_server_fail(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(2026)
    seen: dict[int, int] = {}

    async def worker(service: HttpService, requests: list[tuple[str, bytes]]) -> None:
        headers = {"content-type": "application/json"}
        for path, data in requests:
            response = await service.client.post(path, content=data, headers=headers)
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
            assert response.status_code in ALLOWED, (path, data, response.text)
            if response.status_code != 200:
                error_of(response)

    async def main() -> None:
        async with serving(make_core(max_model_len=64, max_queue_len=200)) as service:
            service.engine.tokenizer = byte_tokenizer(TOOLS_TEMPLATE)
            before = 0
            for start in range(0, COUNT, COUNT // 10):
                requests = [random_request(rng) for _ in range(COUNT // 10)]
                shares = [requests[i::AT_ONCE] for i in range(AT_ONCE)]
                await asyncio.gather(*(worker(service, share) for share in shares))
                if start == 0:
                    before = resident_bytes()
            assert resident_bytes() - before < MAX_GROWTH
            await until(service.is_idle)
            answer = await service.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
            assert answer["choices"][0]["text"] == "bcd"

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert not caplog.records
    # The requests reached what they were meant to: many are fine and many are not. (In the end more
    # sessions are asked for than there may be.)
    assert min(seen[200], seen[400]) > COUNT // 50, seen


def test_p1_noise_on_the_port(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(7)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    pieces = [
        b"", b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n", head,
        head + b"content-length: 5\r\n\r\n{}", head + b"content-length: -1\r\n\r\n",
        head + b"content-length: 99999999999999999999999\r\n\r\n",
        head + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        head + b"transfer-encoding: chunked\r\n\r\nzz\r\n", head + b"expect: 100-continue\r\n\r\n",
        head + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        head + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://x:99999/health HTTP/1.1\r\nhost: x\r\n\r\n", b"a: b\r\n" * 10_000,
        b"GET /%ff%fe HTTP/1.1\r\nhost: x\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 2_000 + b"\r\n",
        *(rng.randbytes(rng.randrange(1, 3000)) for _ in range(50)),
    ]  # fmt: skip

    async def main() -> None:
        async with serving(make_core()) as service:
            for data in pieces:
                await noise(service, data)
            await asyncio.gather(*(noise(service, data) for data in pieces))
            answer = await service.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
            assert answer["choices"][0]["text"] == "bcd"

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert not caplog.records


@pytest.mark.soak
def test_p1_schemathesis_finds_nothing(schemathesis: "subprocess.Popen[str]") -> None:
    """No answer of 5xx, none that the document does not describe, none without a key."""
    printed, _ = schemathesis.communicate(timeout=3600)
    assert schemathesis.returncode == 0, printed[-3000:]
    found = re.search(r"(\d+) generated, (\d+) passed", printed)
    assert found is not None and int(found[2]) >= 100, printed

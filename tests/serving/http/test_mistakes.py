"""What clients get wrong is answered with 4xx in OpenAI's form, before anything is computed."""

import contextlib
import json
import time
from pathlib import Path

import httpx2
import pytest

from swiftjax.serving.http.app import MAX_BODY_BYTES
from swiftjax.serving.http.json_body import MAX_VALUES
from tests.serving.harness import VOCAB_SIZE
from tests.serving.http.harness import HttpService, Json, error_of, run
from tests.serving.test_fuzz import resident_bytes
from tests.stalls import tried_again_after_stalls

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
MAX_GROWTH = 50 * 2**20


@pytest.mark.parametrize("stream", [False, True])
def test_b052_mistakes_are_400_and_never_a_stream(stream: bool) -> None:
    bodies: list[tuple[object, str | None]] = [
        (b"{not json", None),
        (b"", None),
        ([1], None),
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": HI, "stream": "true"}, "stream"),
        ({"messages": HI, "max_tokens": "256"}, "max_tokens"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens"),
        ({"messages": HI, "max_tokens": -1}, "max_tokens"),
        ({"messages": HI, "temperature": -1}, "temperature"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', None),
        (b'{"messages": [{"role": "user", "content": "\\ude00"}]}', None),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', None),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": [{"role": "user", "content": "\x00"}]}, None),
        ({"messages": "Hi"}, "messages"),
    ]

    async def body(service: HttpService) -> None:
        for content, param in bodies:
            if isinstance(content, dict) and stream:
                content = {"stream": True} | content
            error = await service.refused(CHAT, content)
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param, (content, error)
        error = await service.refused(CHAT, {"messages": HI, "model": "nope"}, 404)
        assert error["code"] == "model_not_found"
        assert (await service.client.get("/v1/models/nope")).status_code == 404
        assert service.num_steps == 0 and service.is_idle()
        await service.post(CHAT, {"messages": HI, "max_tokens": 1})

    run(body)


def test_a_wrong_number_is_told_with_its_limit_and_a_wrong_text_never() -> None:
    wrong: dict[str, Json | bytes] = {
        "temperature: expected float >= 0.0; it is -1": {"temperature": -1},
        "stream: expected bool | null, got int; it is 1": {"stream": 1},
        "max_tokens: expected int | null, got str": {"max_tokens": "256"},
        "messages[0].role: expected str, got int; it is 5": {"messages": [{"role": 5}]},
        "stop[1]: expected str, got int; it is 7": {"stop": ["a", 7]},
        "logit_bias[...]: expected float, got str": {"logit_bias": {"97": "a"}},
        "seed: expected int | null, got float": b'{"seed": 1.5, "user": "%b"}' % (b"a" * 2**17),
        "n: expected int <= 16": b'{"n": 17, "messages": "\xff',
    }

    async def body(service: HttpService) -> None:
        for told, fields in wrong.items():
            content = fields if isinstance(fields, bytes) else {"messages": HI} | fields
            assert (await service.refused(CHAT, content))["message"] == told

    run(body)


def test_b052_null_content_beside_tool_calls_is_no_mistake() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "user", "content": "\U0001f9e0"},  # sent as a pair of surrogates
    ]

    async def body(service: HttpService) -> None:
        await service.post(CHAT, {"messages": messages, "max_tokens": 1})

    run(body)


def test_b019_ids_outside_the_vocabulary() -> None:
    bad: list[Json] = [
        {"prompt": [VOCAB_SIZE]},
        {"prompt": [-1]},
        {"prompt": [[-1]]},
        {"prompt": [2**40]},
        {"prompt": [2**80]},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ""},
        {"prompt": [97, "a"]},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": "a", "logit_bias": {"99999999": 5}},
        {"prompt": "a", "logit_bias": {"-1": 5}},
        {"prompt": "a", "logit_bias": {"abc": 1}},
        {"prompt": "a", "logit_bias": {"1": 101}},
        {"prompt": "a", "stop_token_ids": [VOCAB_SIZE], "min_tokens": 1},
    ]

    async def body(service: HttpService) -> None:
        for request in bad:
            await service.refused(COMPLETE, request)
        assert service.num_steps == 0
        for ids in ([VOCAB_SIZE], [-1], [2**80], ["a"]):
            await service.refused("/detokenize", {"tokens": ids})
        twice = b'{"prompt": "a", "logit_bias": {"97": 1, "98": 2, "%b": 3}}'
        for name in (b"97", b"\\u0039\\u0037"):
            error = await service.refused("/v1/completions", twice % name)
            assert error["param"] == "logit_bias" and "97 twice" in error["message"]
        good = {"prompt": "a", "logit_bias": {"97": -100}, "max_tokens": 1}
        assert (await service.post(COMPLETE, good))["choices"][0]["text"] == "b"

    run(body)


@tried_again_after_stalls
def test_b069_huge_numbers_and_lists_cost_nothing() -> None:
    bad: list[Json] = [
        {"n": 4_000_000},
        {"best_of": 4_000_000},
        {"top_logprobs": 10**9, "logprobs": True},
        {"top_logprobs": -1, "logprobs": True},
        {"max_tokens": 10**18},
        {"max_tokens": 2.5},
        {"seed": 2**64},
        {"seed": -1},
        {"seed": 10**40},
        {"stop": ["a"] * 10**6},
        {"stop": "x" * 10**7},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"logit_bias": {str(i): 1 for i in range(301)}},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": -0.1},
    ]

    async def body(service: HttpService) -> None:
        for text in ("a" * 10**7, ["a"] * 10**6):  # what the client keeps of its largest bodies
            await service.refused(COMPLETE, {"prompt": "a", "stop": text})
        before = resident_bytes()
        for fields in bad:
            started = time.monotonic()
            is_chat = "top_logprobs" in fields
            prompt: Json = {"messages": HI} if is_chat else {"prompt": "a"}
            await service.refused(CHAT if is_chat else COMPLETE, prompt | fields)
            assert time.monotonic() - started < 1.0, list(fields)
        await service.refused(COMPLETE, {"prompt": ["a"] * 129})
        await service.refused(COMPLETE, {"prompt": ["a"] * 9, "n": 16})
        assert service.num_steps == 0
        assert resident_bytes() - before < MAX_GROWTH
        # max_tokens is cut to what the context leaves, however large it is.
        request = {"prompt": [97] * 100, "max_tokens": 2147483600, "ignore_eos": True}
        answer = await service.post(COMPLETE, request)
        assert answer["usage"]["total_tokens"] == 128
        assert answer["choices"][0]["finish_reason"] == "length"
        for prompt in ([97] * 128, "a" * 128, "a" * 128 * 129):
            error = await service.refused(COMPLETE, {"prompt": prompt})
            assert "128" in error["message"]

    run(body, max_model_len=128)


def test_bodies_are_refused_while_they_arrive() -> None:
    """Once to fill the heap with what it keeps; a second time nothing grows."""

    async def body(service: HttpService) -> None:
        await _refused_bodies(service)
        before = resident_bytes()
        await _refused_bodies(service)
        assert resident_bytes() - before < MAX_GROWTH
        await service.post(CHAT, {"messages": HI, "max_tokens": 1})

    run(body)


async def _refused_bodies(service: HttpService) -> None:
    json_type = {"content-type": "application/json"}
    response = await service.client.post(
        CHAT, content=b"x" * (MAX_BODY_BYTES + 1), headers=json_type
    )
    assert response.status_code == 413 and str(MAX_BODY_BYTES) in error_of(response)["message"]

    async def endless():  # type: ignore[no-untyped-def]
        for _ in range(200):
            yield b" " * 2**20

    response = await service.client.post(CHAT, content=endless(), headers=json_type)
    assert response.status_code == 413
    many = b'{"messages": [' + b"[]," * (MAX_VALUES + 1) + b"1]}"
    response = await service.client.post(CHAT, content=many, headers=json_type)
    assert response.status_code == 400 and str(MAX_VALUES) in response.text
    deep = b'{"messages": [{"role": "user", "content": [{"a": ' + b"[" * 10**5
    response = await service.client.post(CHAT, content=deep, headers=json_type)
    assert response.status_code == 400 and "deeply" in response.text
    response = await service.client.post(CHAT, content=json.dumps({"messages": HI}))
    assert response.status_code == 415


def test_headers_and_paths() -> None:
    async def body(service: HttpService) -> None:
        response = await service.client.get("/health", headers={"x-long": "x" * 20_000})
        assert response.status_code == 431
        # So long that the connection may be closed before all of it was sent.
        with contextlib.suppress(httpx2.ReadError, httpx2.WriteError):
            response = await service.client.get("/health", headers={"x-long": "x" * 200_000})
            assert response.status_code == 400
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("POST", "/nothing", 404),
            ("GET", CHAT, 405),
            ("PUT", "/v1/models", 405),
            ("POST", "/health", 405),
            ("GET", "/v1/models/", 404),
        ):
            response = await service.client.request(method, path)
            assert response.status_code == status, path
            error_of(response)

    run(body)


@tried_again_after_stalls
def test_small_answers_are_not_held_back() -> None:
    """Nagle's algorithm would add 40 ms to each."""

    async def body(service: HttpService) -> None:
        await service.client.get("/health")
        started = time.monotonic()
        for _ in range(20):
            await service.client.get("/health")
        assert time.monotonic() - started < 0.6

    run(body)


def test_request_ids_are_echoed_or_made() -> None:
    async def body(service: HttpService) -> None:
        for sent, echoed in (("my-id.1", True), ("a b", False), ("x" * 200, False), ("", False)):
            response = await service.client.get("/version", headers={"x-request-id": sent})
            assert (response.headers["x-request-id"] == sent) is echoed
            assert response.headers["x-request-id"]

    run(body)


def test_bug_is_500_with_an_id_and_its_text_stays_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a secret of the machine")

    async def body(service: HttpService) -> None:
        monkeypatch.setattr(service.engine, "stream", fail)
        for stream in (False, True):
            error = await service.refused(CHAT, {"messages": HI, "stream": stream}, 500)
            assert "secret" not in error["message"] and "KeyError" not in error["message"]
            error_id = error["message"].split()[2].rstrip(";")
            assert len(error_id) == 16 and error_id in caplog.text
        assert "a secret of the machine" in caplog.text

    run(body)


def test_full_queue_is_429_with_a_time_to_retry() -> None:
    async def body(service: HttpService) -> None:
        request = {"prompt": ["a"] * 8, "max_tokens": 2}
        response = await service.client.post(COMPLETE, json=request)
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        assert error_of(response)["type"] == "rate_limit_error"
        await service.post(COMPLETE, {"prompt": "a", "max_tokens": 2})

    run(body, max_num_seqs=1, max_queue_len=2, delay=0.01)


@tried_again_after_stalls
def test_b041_what_can_never_fit_is_refused_at_once() -> None:
    async def body(service: HttpService) -> None:
        for request in ({"prompt": [97] * 200}, {"prompt": [97] * 100, "max_tokens": 100}):
            started = time.monotonic()
            await service.refused(COMPLETE, request | {"ignore_eos": True})
            assert time.monotonic() - started < 1.0
            await service.post(COMPLETE, {"prompt": "a", "max_tokens": 3})

    run(body, max_model_len=512, num_pages=32)  # 32 pages of 4 tokens

"""POST /v1/chat/completions over the byte vocabulary: shapes, streams, scores, what is refused."""

import time
from typing import Any

import pytest

from tests.serving.http.harness import HttpService, Json, run, usage_of

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]  # the template writes "user:Hi;", so "<=>..." follows


def test_whole_answer() -> None:
    async def body(service: HttpService) -> None:
        answer = await service.post(PATH, {"model": "bytes", "messages": HI, "max_tokens": 3})
        [choice] = answer["choices"]
        assert choice == {
            "index": 0,
            "message": {"role": "assistant", "content": "<=>", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "swiftjax_finish_reason": "length",
            "stop_reason": None,
        }
        assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
        assert answer["usage"] == usage_of(8, 3)

    run(body)


def test_without_max_tokens_the_context_is_the_limit() -> None:
    async def body(service: HttpService) -> None:
        answer = await service.post(PATH, {"messages": HI, "ignore_eos": True})
        assert answer["usage"]["total_tokens"] == 128
        answer = await service.post(
            PATH, {"messages": HI, "ignore_eos": True, "max_completion_tokens": 2**31 - 1}
        )
        assert answer["usage"]["total_tokens"] == 128
        assert answer["choices"][0]["finish_reason"] == "length"

    run(body, max_model_len=128)


@pytest.mark.parametrize("in_session", [False, True])
def test_a_time_limit_counts_from_the_arrival_not_from_the_rendering(
    monkeypatch: pytest.MonkeyPatch, in_session: bool
) -> None:
    async def body(service: HttpService) -> None:
        render = service.engine.tokenizer.apply_chat_template

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.25)
            return render(*args, **kwargs)

        monkeypatch.setattr(service.engine.tokenizer, "apply_chat_template", slowly)
        request: Json = {"messages": HI, "max_tokens": 100, "ignore_eos": True, "time_limit": 0.2}
        if in_session:
            request["session"] = (await service.post("/v1/sessions", {}))["id"]
        answer = await service.post(PATH, request)
        assert answer["choices"][0]["swiftjax_finish_reason"] == "time_limit"
        assert answer["usage"]["completion_tokens"] < 5

    run(body, delay=0.01)


@pytest.mark.parametrize("usage", [False, True])
def test_b051_framing_of_a_stream_with_two_choices(usage: bool) -> None:
    async def body(service: HttpService) -> None:
        request: Json = {"messages": HI, "n": 2, "max_tokens": 3}
        if usage:
            request["stream_options"] = {"include_usage": True}
        chunks = await service.events(PATH, request)
        if usage:
            last = chunks.pop()
            assert last["choices"] == []
            assert last["usage"] == usage_of(8, 6)
        assert all("usage" not in chunk for chunk in chunks)
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
        for index in (0, 1):
            mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert [c["delta"].get("role") for c in mine] == ["assistant"] + [None] * (
                len(mine) - 1
            )
            reasons = [c["finish_reason"] for c in mine]
            assert reasons == [None] * (len(mine) - 1) + ["length"]
            assert "".join(c["delta"].get("content", "") for c in mine) == "<=>"

    run(body)


def test_special_tokens_are_named() -> None:
    async def body(service: HttpService) -> None:
        info = (await service.client.get("/tokenizer_info")).json()
        assert info == {"bos_token": None, "eos_token": "<end>", "model_max_length": 4096}

    run(body)


def test_scores_of_chat_tokens() -> None:
    async def body(service: HttpService) -> None:
        request = {"messages": HI, "max_tokens": 2, "logprobs": True}
        expected = [
            {"token": t, "logprob": -0.5, "bytes": [ord(t)], "top_logprobs": []} for t in "<="
        ]
        [choice] = (await service.post(PATH, request))["choices"]
        assert choice["logprobs"] == {"content": expected, "refusal": None}
        chunks = await service.events(PATH, request)
        streamed = [c["choices"][0]["logprobs"] for c in chunks]
        assert [e for part in streamed if part for e in part["content"]] == expected

    run(body)


def test_stop_string_and_n() -> None:
    async def body(service: HttpService) -> None:
        request = {"messages": HI, "max_tokens": 50, "stop": ["?@"], "n": 3, "seed": 1}
        answer = await service.post(PATH, request)
        assert [c["message"]["content"] for c in answer["choices"]] == ["<=>"] * 3
        assert {(c["finish_reason"], c["stop_reason"]) for c in answer["choices"]} == {
            ("stop", "?@")
        }
        request["include_stop_str_in_output"] = True
        answer = await service.post(PATH, request)
        assert answer["choices"][0]["message"]["content"] == "<=>?@"

    run(body)


def test_turns_of_every_kind_are_taken() -> None:
    """Parts of text, names, an answer as a client got it, and one without text."""

    async def body(service: HttpService) -> None:
        messages = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
            {"role": "assistant", "content": "b", "refusal": None, "annotations": []},
            {"role": "assistant", "content": None},
            {"role": "user", "content": "\ud83d\ude00"},
        ]
        answer = await service.post("/tokenize", {"messages": messages})
        text = "system:S;user:a;assistant:b;assistant:;user:\U0001f600;"
        assert bytes(answer["tokens"]).decode() == text
        await service.post(PATH, {"messages": messages, "max_tokens": 1})

    run(body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"web_search_options": {"x": 1}}, "web_search_options"),
        ({"moderation": {"x": 1}}, "moderation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"max_tokns": 5}, "max_tokns"),
        ({"chat_template": "{{ 7 * 7 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ],
)
def test_b070_fields_that_would_change_the_answer_are_refused(fields: Json, param: str) -> None:
    async def body(service: HttpService) -> None:
        error = await service.refused(PATH, {"messages": HI} | fields)
        assert error["param"] == param and param.split(".")[-1] in error["message"]
        assert service.num_steps == 0

    run(body)


def test_fields_without_effect_are_taken() -> None:
    async def body(service: HttpService) -> None:
        fields = {
            "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
            "safety_identifier": "s", "prompt_cache_key": "k", "reasoning_effort": "low",
            "verbosity": "low", "parallel_tool_calls": True, "tools": [], "tool_choice": "auto",
            "modalities": ["text"], "response_format": {"type": "text"}, "functions": [],
            "session_id": "s", "top_k": -1, "temperature": None, "stop": None, "audio": None,
        }  # fmt: skip
        await service.post(PATH, {"messages": HI, "max_tokens": 1} | fields)

    run(body)


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_b066_speculation_is_refused_where_a_request_asks_for_it(path: str) -> None:
    """There is none here, which a client that counts on it has to know."""

    async def body(service: HttpService) -> None:
        prompt: Json = {"messages": HI} if path == PATH else {"prompt": "a"}
        for name in ("num_speculative_tokens", "speculative_config", "draft_model"):
            error = await service.refused(path, prompt | {name: 3})
            assert error["param"] == name
        await service.refused(path, prompt | {"prediction": {"type": "content", "content": "a"}})
        assert service.num_steps == 0

    run(body)

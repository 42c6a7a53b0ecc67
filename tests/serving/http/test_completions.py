"""POST /v1/completions over the byte vocabulary, where "a" is answered with "bcdef...": shapes,
echo, scores, several prompts, streams.
"""

import pytest

from swiftjax.engine.request import RequestOptions
from swiftjax.serving.keys import KeyEntry
from tests.serving.http.harness import KEY, HttpService, make_keys, run, usage_of

PATH = "/v1/completions"
SCORE = -0.5  # what the fake runner gives every token


def test_whole_answer() -> None:
    async def body(service: HttpService) -> None:
        answer = await service.post(PATH, {"model": "bytes", "prompt": "a", "max_tokens": 3})
        [choice] = answer["choices"]
        assert choice == {
            "index": 0,
            "text": "bcd",
            "logprobs": None,
            "finish_reason": "length",
            "swiftjax_finish_reason": "length",
            "stop_reason": None,
        }
        assert answer["usage"] == usage_of(1, 3)
        assert answer["object"] == "text_completion" and answer["model"] == "bytes"
        assert answer["id"].startswith("cmpl-")
        # Without max_tokens 16 tokens, as OpenAI has it.
        answer = await service.post(PATH, {"prompt": "!"})
        assert answer["usage"]["completion_tokens"] == 16

    run(body)


def test_who_asks_reaches_the_engine() -> None:
    async def body(service: HttpService) -> None:
        asked = {"prompt": "abcdefghijk", "max_tokens": 1, "priority": -3, "client_id": "lab"}
        cached = []
        for salt in (None, None, "mine"):
            answer = await service.post(PATH, asked | {"cache_salt": salt, "session_id": "s"})
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 8, 0]
        for bad in ({"priority": 2**31}, {"client_id": "x" * 129}, {"cache_salt": "a\n"}):
            await service.refused(PATH, asked | bad)

    run(body)


def test_prompts_as_ids_and_in_lists() -> None:
    async def body(service: HttpService) -> None:
        for prompt, texts in (
            ([97], ["bc"]),
            (["a", "c"], ["bc", "de"]),
            ([[97], [99]], ["bc", "de"]),
        ):
            answer = await service.post(PATH, {"prompt": prompt, "max_tokens": 2, "n": 2})
            choices = answer["choices"]
            assert [c["index"] for c in choices] == list(range(2 * len(texts)))
            assert [c["text"] for c in choices] == [text for text in texts for _ in range(2)]
            assert answer["usage"]["prompt_tokens"] == len(texts)
            assert answer["usage"]["completion_tokens"] == 4 * len(texts)

    run(body)


def test_streamed_prompts_are_told_apart_by_index() -> None:
    async def body(service: HttpService) -> None:
        request = {"prompt": ["a", "c", "e"], "max_tokens": 3, "n": 2}
        request["stream_options"] = {"include_usage": True}
        *chunks, last = await service.events(PATH, request)
        assert last["choices"] == [] and last["usage"]["total_tokens"] == 3 + 18
        texts: dict[int, str] = {}
        ends: dict[int, str] = {}
        for chunk in chunks:
            [choice] = chunk["choices"]
            assert choice["index"] not in ends, "a chunk after the end"
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
        assert texts == {0: "bcd", 1: "bcd", 2: "def", 3: "def", 4: "fgh", 5: "fgh"}
        assert ends == dict.fromkeys(range(6), "length")
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1

    run(body, max_num_seqs=8)


@pytest.mark.parametrize("stream", [False, True])
def test_scores_stand_where_their_tokens_do(stream: bool) -> None:
    """A token that is a part of a character has no text of its own; offsets count characters."""

    async def body(service: HttpService) -> None:
        request = {"prompt": [0xC3, 0xA9, 0x41, 0xC3], "max_tokens": 3, "logprobs": 0}
        if stream:
            chunks = await service.events(PATH, request)
            parts = [c["choices"][0]["logprobs"] for c in chunks]
            scores = {name: [x for part in parts for x in part[name]] for name in parts[0]}
        else:
            scores = (await service.post(PATH, request))["choices"][0]["logprobs"]
        assert scores["tokens"] == ["bytes:\\xc4", "bytes:\\xc5", "bytes:\\xc6"]
        assert scores["token_logprobs"] == [SCORE] * 3
        assert scores["top_logprobs"][0] == {"bytes:\\xc4": SCORE}
        assert scores["text_offset"] == [0, 0, 1]

    run(body)


def test_stop_token_has_no_score_and_no_text() -> None:
    async def body(service: HttpService) -> None:
        request = {"prompt": "a", "stop_token_ids": [100], "logprobs": 1, "max_tokens": 9}
        [choice] = (await service.post(PATH, request))["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
            "bc",
            "stop",
            100,
        )
        assert choice["logprobs"]["tokens"] == ["b", "c"]

    run(body)


def test_time_limit_is_a_stop_that_tells_the_truth_beside_it() -> None:
    async def body(service: HttpService) -> None:
        request = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "time_limit": 0.1}
        answer = await service.post(PATH, request)
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["swiftjax_finish_reason"] == "time_limit"
        assert 0 < answer["usage"]["completion_tokens"] < 4000

    run(body, delay=0.005)


def test_abort_is_a_stop_that_tells_the_truth_beside_it() -> None:
    async def body(service: HttpService) -> None:
        request = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with service.client.stream("POST", PATH, json=request) as response:
            lines = response.aiter_lines()
            first = await anext(lines)
            service.engine.abort(first.split('"id":"')[1].split('"')[0])
            rest = [line async for line in lines if line]
        assert '"finish_reason":"stop","swiftjax_finish_reason":"abort"' in rest[-2]

    run(body, delay=0.005)


def test_prefix_hash_is_that_of_the_head() -> None:
    async def body(service: HttpService) -> None:
        async def name(prompt: object) -> str:
            response = await service.client.post(PATH, json={"prompt": prompt, "max_tokens": 1})
            return response.headers["x-swiftjax-prefix-hash"]

        head = "x" * 256
        assert await name(head + "a") == await name(head + "b") != await name("y" + head)
        assert await name([1] * 64 + [2]) == await name([1] * 64 + [3]) != await name([1, 2])

    run(body)


def test_b015_seed_reaches_the_engine_and_is_fresh_without_one() -> None:
    async def body(service: HttpService) -> None:
        seeds: list[int] = []
        submit = service.engine._link.submit
        service.engine._link.submit = lambda r: (seeds.append(r.seed), submit(r))  # type: ignore
        for fields in ({"seed": 42}, {"seed": 2**64 - 1}, {}, {}):
            await service.post(PATH, {"prompt": "a", "max_tokens": 1} | fields)
        assert seeds[:2] == [42, 2**64 - 1] and seeds[2] != seeds[3]

    run(body)


def test_options_of_a_request_reach_the_engine_with_the_keys_name() -> None:
    async def body(service: HttpService) -> None:
        seen: list[RequestOptions] = []
        submit = service.engine._link.submit
        service.engine._link.submit = lambda r: (seen.append(r.options), submit(r))  # type: ignore
        fields = {"priority": -3, "session_id": "s", "cache_salt": "c", "time_limit": 9}
        await service.post(PATH, {"prompt": "a", "max_tokens": 1} | fields)
        [options] = seen
        assert (options.priority, options.session_id, options.cache_salt) == (-3, "s", "c")
        assert options.time_limit == 9 and len(options.client_id) == 16
        for fields in ({"priority": 2**31}, {"session_id": "a\x00"}, {"cache_salt": "x" * 200}):
            await service.refused(PATH, {"prompt": "a"} | fields)

    run(body, keys=make_keys(KeyEntry(KEY)))

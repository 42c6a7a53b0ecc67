"""The blocking client: values in, deltas out, our own errors raised."""

import asyncio
import threading
import uuid
from collections.abc import Iterator

import pytest

from swiftjax.engine.request import GenerationConfig, RequestOptions
from swiftjax.errors import DeadlineError, InvalidRequestError, NotFoundError, NotReadyError
from swiftjax.serving.async_client import AsyncClient
from swiftjax.serving.client import Client
from swiftjax.serving.options import read_generation_config, write_options
from swiftjax.serving.proto import swiftjax_pb2 as pb
from tests.serving.harness import END_ID, VOCAB_SIZE, Service, make_core, serving, until
from tests.stalls import tried_again_after_stalls


class ServerThread:
    """The in-process server on an event loop of its own, for blocking tests."""

    def __init__(self) -> None:
        self.service: Service | None = None
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        self._ready.wait()

    async def _run(self) -> None:
        try:
            async with serving(make_core(delay=0.005)) as self.service:
                self._ready.set()
                await self._stop.wait()
        finally:
            self._ready.set()  # who waits for a server that cannot be is to be told

    def close(self) -> None:
        """Stop and wait."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    thread = ServerThread()
    assert thread.service is not None
    yield thread.service
    thread.close()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.server.address) as connected:
        yield connected


def test_proxy_of_the_environment_is_not_asked_for_this_machine(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with Client(service.server.address) as client:
        assert client.get_model().vocab_size == VOCAB_SIZE


def test_each_kind_of_prompt(client: Client) -> None:
    config = GenerationConfig(max_new_tokens=3)
    for prompt in ({"text": "a"}, {"token_ids": [ord("a")]}):
        deltas = list(client.generate(**prompt, config=config))  # type: ignore[arg-type]
        assert "".join(d.text for d in deltas) == "bcd"
        assert [i for d in deltas for i in d.token_ids] == [98, 99, 100]
        last = deltas[-1]
        assert (last.finish_reason, last.num_prompt_tokens, last.num_output_tokens) == (
            "length", 1, 3,
        )  # fmt: skip
        assert all(d.finish_reason is None and d.num_output_tokens is None for d in deltas[:-1])
    messages = [{"role": "user", "content": "1"}]
    assert "".join(d.text for d in client.generate(messages=messages, config=config)) == "<=>"


def test_without_a_config_the_defaults_of_the_server_hold(client: Client) -> None:
    last = list(client.generate(text="\x10"))[-1]
    # 240 steps up to the end-of-sequence token, below the default of 256.
    assert (last.finish_reason, last.matched_stop) == ("stop", END_ID)


def test_tokenize_detokenize_get_model(client: Client) -> None:
    assert client.tokenize(text="hé") == [0x68, 0xC3, 0xA9]
    assert bytes(client.tokenize(messages=[{"role": "u", "content": "x"}])) == b"u:x;"
    assert client.detokenize([0x68, END_ID]) == "h"
    assert client.detokenize([0x68, END_ID], skip_special_tokens=False) == "h<end>"
    assert client.get_model().vocab_size == VOCAB_SIZE


def test_errors_of_the_server_are_ours(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match=f"token id {VOCAB_SIZE} is outside"):
        list(client.generate(token_ids=[VOCAB_SIZE]))
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        list(client.generate(token_ids=[]))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        client.detokenize([-1])
    with pytest.raises(DeadlineError):
        config = GenerationConfig(max_new_tokens=4000, ignore_eos=True)
        list(client.generate(text="a", config=config, timeout=0.1))
    with Client("127.0.0.1:1") as nobody, pytest.raises(NotReadyError):
        nobody.get_model()


def test_prompts_that_contradict_each_other(client: Client) -> None:
    for prompts in ({}, {"text": "a", "token_ids": [1]}):
        with pytest.raises(InvalidRequestError, match="exactly one"):
            next(client.generate(**prompts))
    for texts in ({}, {"text": "a", "messages": [{"role": "u", "content": "x"}]}):
        with pytest.raises(InvalidRequestError, match="exactly one"):
            client.tokenize(**texts)


def test_closing_the_iterator_stops_the_work(client: Client, service: Service) -> None:
    config = GenerationConfig(max_new_tokens=4000, ignore_eos=True)
    deltas = client.generate(text="a", config=config)
    next(deltas)
    assert service.engine.stats().num_running == 1
    deltas.close()  # type: ignore[attr-defined]
    asyncio.run(until(service.is_idle))


@pytest.mark.parametrize(
    "config",
    [
        GenerationConfig(),
        GenerationConfig(temperature=0.7, top_p=0.5, top_k=7, seed=2**64 - 1),
        GenerationConfig(max_new_tokens=1, stop=("a", "b"), stop_token_ids=(1, 2)),
        GenerationConfig(ignore_eos=True, include_stop_str=True, stop="x", top_p=0.0),
        GenerationConfig(min_p=0.1, typical_p=0.9, repetition_penalty=1.2, n=3, min_new_tokens=2),
        GenerationConfig(presence_penalty=-1.0, frequency_penalty=0.5, logit_bias={5: 1.5}),
        GenerationConfig(allowed_token_ids=(1, 2), banned_token_ids=(3,), bad_words_ids=((4, 5),)),
        GenerationConfig(echo=True, logprobs=2, prompt_logprobs=0, logprobs_mode="processed"),
    ],
)
def test_config_survives_the_message(config: GenerationConfig) -> None:
    request = pb.GenerateRequest()
    write_options(config, request)
    assert read_generation_config(request) == config


def test_unset_options_are_the_defaults() -> None:
    assert read_generation_config(pb.GenerateRequest()) == GenerationConfig()


def test_turns_of_a_session(client: Client, service: Service) -> None:
    session, five = client.open_session(seed=3), GenerationConfig(max_new_tokens=5)

    def turn(name: str, text: str | None = None) -> str:
        return "".join(
            delta.text for delta in client.generate(session=name, text=text, config=five)
        )

    assert [turn(session, "a"), turn(session), turn(session, "A")] == ["bcdef", "ghijk", "BCDEF"]
    fork = client.fork_session(session)
    assert turn(fork) == "GHIJK"

    async def over_async_client() -> str:
        async with AsyncClient(service.server.address) as other:
            name = await other.fork_session(fork)
            deltas = other.generate(session=name, config=five)
            text = "".join([delta.text async for delta in deltas])
            await other.close_session(name)
            await other.close_session(await other.open_session())
            return text

    assert asyncio.run(over_async_client()) == "LMNOP"
    for name in (session, fork):
        client.close_session(name)
    with pytest.raises(NotFoundError):
        client.close_session(fork)


def test_choices_and_echo_reach_the_client(client: Client) -> None:
    """Every choice has its index, its end and its totals; log-probabilities come when asked."""
    config = GenerationConfig(max_new_tokens=4, n=3, echo=True, logprobs=0)
    texts = ["", "", ""]
    ends = []
    scores = 0
    for delta in client.generate(text="a", config=config):
        texts[delta.index] += delta.text
        scores += len(delta.logprobs)
        if delta.finish_reason is not None:
            ends.append((delta.index, delta.finish_reason, delta.num_output_tokens))
    assert texts == ["abcde"] * 3 and scores == 12
    assert sorted(ends) == [(i, "length", 4) for i in range(3)]


def test_a_stop_string_ends_its_choice_only(client: Client, service: Service) -> None:
    config = GenerationConfig(max_new_tokens=50, n=2, stop="ef")
    ends = [d for d in client.generate(text="a", config=config) if d.finish_reason]
    assert [(d.finish_reason, d.matched_stop) for d in ends] == [("stop", "ef")] * 2
    asyncio.run(until(service.is_idle))


def test_options_over_their_limits_are_refused(client: Client) -> None:
    """Counted before anything is copied or queued."""
    biases = [pb.TokenBias(token_id=i, bias=1.0) for i in range(301)]
    for bad in (
        pb.SamplingOptions(n=4_000_000),
        pb.SamplingOptions(logit_bias=biases),
        pb.SamplingOptions(logit_bias=[pb.TokenBias(token_id=-1, bias=5.0)]),
        pb.SamplingOptions(banned_token_ids=[1] * 513),
        pb.SamplingOptions(bad_words=[pb.TokenIds(ids=[1] * 33)]),
    ):
        with pytest.raises(InvalidRequestError):
            read_generation_config(pb.GenerateRequest(sampling=bad))
    for output in (pb.OutputOptions(logprobs=10**9), pb.OutputOptions(logprobs=-1)):
        with pytest.raises(InvalidRequestError):
            read_generation_config(pb.GenerateRequest(output=output))


@tried_again_after_stalls
def test_options_reach_the_engine(client: Client) -> None:
    salt = uuid.uuid4().hex  # nothing is cached yet
    options = RequestOptions(time_limit=0.2, client_id="me", cache_salt=salt)
    config = GenerationConfig(max_new_tokens=4000, ignore_eos=True)
    for cached in (0, 8):
        last = list(client.generate(text="abcdefghijk", config=config, options=options))[-1]
        assert (last.finish_reason, last.num_cached_tokens) == ("time_limit", cached)

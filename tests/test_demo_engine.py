"""The blocking Engine on real weights: the published reference facts of SmolLM2, end to end."""

from pathlib import Path

import numpy as np
import pytest

from swiftjax import Engine, GenerationConfig
from swiftjax.errors import InvalidRequestError, NotFoundError

pytestmark = pytest.mark.demo_model

VOCAB = 49152
FRANCE = "The capital of France is"
FRANCE_GREEDY = [7042, 30, 198, 198, 504, 2988, 314]
COUNT = "1, 2, 3, 4, 5,"
COUNT_GREEDY = [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28]
HI_GREEDY = [19556, 17, 1073, 416, 339, 4237, 346, 1834, 47, 2]
SUM_GREEDY = [504, 2988, 288, 451, 8170, 4119, 1732, 314, 216, 36, 30, 2]


@pytest.fixture(scope="module")
def engine(demo_checkpoint: Path) -> Engine:
    return Engine(
        str(demo_checkpoint), max_batch_size=4, max_model_len=512, max_num_batched_tokens=64
    )


def chat(engine: Engine, text: str) -> list[int]:
    ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert isinstance(ids, list)
    return ids


def test_r1_greedy_texts(engine: Engine) -> None:
    """Four prompts together, as token ids and as text, give the reference ids and texts."""
    prompts = [FRANCE, COUNT, chat(engine, "Hi"), chat(engine, "What is 2+2?")]
    france, count, hi, total = engine.generate(prompts, GenerationConfig(max_new_tokens=16))
    assert list(france.token_ids[:7]) == FRANCE_GREEDY
    assert list(count.token_ids) == COUNT_GREEDY
    assert (count.text, count.finish_reason) == (" 6, 7, 8, 9, 10,", "length")
    assert list(hi.token_ids) == HI_GREEDY
    assert (hi.text, hi.finish_reason) == ("Hello! How can I assist you today?", "stop")
    assert list(total.token_ids) == SUM_GREEDY
    assert total.text == "The answer to this classic math problem is 4."
    assert len(hi.prompt_token_ids) == 31 and len(total.prompt_token_ids) == 37


def test_r1_first_logprob_is_raw_at_any_temperature(engine: Engine) -> None:
    for temperature in (0.0, 0.5, 2.0):
        config = GenerationConfig(max_new_tokens=1, temperature=temperature, top_k=1)
        [answer] = engine.generate(FRANCE, config)
        assert answer.token_ids == (7042,)
        assert answer.logprobs[0] == pytest.approx(-0.2581, abs=1e-3)


def test_batch_equals_alone(engine: Engine) -> None:
    prompts = [FRANCE, COUNT, "Once upon a time", "def add(a, b):"]
    config = GenerationConfig(max_new_tokens=24)
    together = engine.generate(prompts, config)
    for prompt, answer in zip(prompts, together, strict=True):
        [alone] = engine.generate(prompt, config)
        assert alone.token_ids == answer.token_ids
        np.testing.assert_allclose(alone.logprobs, answer.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [(", 8", False, " 6, 7"), ("7, 8", False, " 6, "), ("7, 8", True, " 6, 7, 8")],
)
def test_b006_stop_strings(engine: Engine, stop: str, include: bool, text: str) -> None:
    """A stop string over token edges ends the text exactly before (or after) it."""
    config = GenerationConfig(max_new_tokens=32, stop=(stop,), include_stop_str=include)
    [answer] = engine.generate(COUNT, config)
    assert (answer.text, answer.finish_reason) == (text, "stop")
    assert engine.built.core.stats().num_free_pages == engine.built.core.stats().num_pages


def test_b006_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="non-empty"):
        GenerationConfig(stop=("",))


def test_b008_several_stop_ids(engine: Engine) -> None:
    """A further stop id ends the text without showing it; ignore_eos goes on past EOS."""
    [answer] = engine.generate(FRANCE, GenerationConfig(max_new_tokens=5, stop_token_ids=(30,)))
    assert answer.token_ids == (7042, 30)
    assert (answer.text, answer.finish_reason) == (" Paris", "stop")
    prompt = chat(engine, "Hi")
    [answer] = engine.generate([prompt], GenerationConfig(max_new_tokens=12, ignore_eos=True))
    assert len(answer.token_ids) == 12 and answer.finish_reason == "length"


def test_b015_seeded_sampling_repeats(engine: Engine) -> None:
    """The same seed repeats in any company; without a seed calls differ."""
    config = GenerationConfig(max_new_tokens=16, temperature=1.0, seed=42, ignore_eos=True)
    free = GenerationConfig(max_new_tokens=16, temperature=1.0, ignore_eos=True)
    [alone] = engine.generate(FRANCE, config)
    ids = [engine.add_request(COUNT, free), engine.add_request(FRANCE, config)]
    while not all(engine.is_request_finished(i) for i in ids):
        engine.step()
    done = {answer.id: answer for answer in engine.get_completed_requests()}
    assert done[ids[1]].token_ids == alone.token_ids
    assert len({engine.generate(FRANCE, free)[0].token_ids for _ in range(5)}) > 1
    edge = GenerationConfig(max_new_tokens=1, temperature=1.0, seed=2**64 - 1)
    assert len(engine.generate(FRANCE, edge)[0].token_ids) == 1
    with pytest.raises(InvalidRequestError, match="seed"):
        GenerationConfig(seed=-1)


@pytest.mark.parametrize(
    "bad", [[VOCAB], [-1], [2**40], [], [[-1]]], ids=["V", "-1", "2^40", "empty", "nested"]
)
def test_b019_bad_ids_are_refused(engine: Engine, bad: list) -> None:
    """Ids outside the vocabulary never reach the device, and the next request is fine."""
    with pytest.raises(InvalidRequestError):
        engine.generate([bad] if bad != [[-1]] else bad)
    with pytest.raises(InvalidRequestError):
        engine.generate(FRANCE, GenerationConfig(stop_token_ids=(VOCAB,)))
    assert not engine.built.core.has_work
    assert engine.generate(FRANCE, GenerationConfig(max_new_tokens=1))[0].token_ids == (7042,)


def test_b019_empty_text_without_bos_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.generate("")


def test_prompt_longer_than_the_model(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match=r"600 tokens; max_model_len is 512.*to 511"):
        engine.generate([[5] * 600])


def test_max_new_tokens_is_cut_to_the_context(engine: Engine) -> None:
    config = GenerationConfig(max_new_tokens=2**31 - 1, ignore_eos=True)
    [answer] = engine.generate([[5] * 505], config)
    assert (len(answer.token_ids), answer.finish_reason) == (7, "length")


def test_step_by_step(engine: Engine) -> None:
    """The seeds' four calls, an abort, and answers that are handed over once."""
    config = GenerationConfig(max_new_tokens=6)
    first = engine.add_request(FRANCE, config)
    second = engine.add_request(COUNT, config, request_id="mine")
    assert second == "mine" and not engine.is_request_finished(first)
    engine.step()
    engine.abort_request("mine")
    while not engine.is_request_finished(first):
        engine.step()
    done = {answer.id: answer for answer in engine.get_completed_requests()}
    assert done[first].output == " Paris.\n\nThe answer"[: len(done[first].output)]
    assert done["mine"].finish_reason == "abort" and len(done["mine"].token_ids) <= 2
    assert done[first].timings.first_token <= done[first].timings.total
    assert engine.get_completed_requests() == []
    with pytest.raises(NotFoundError):
        engine.is_request_finished(first)


def test_a_bad_prompt_among_good_ones_starts_nothing(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError):
        engine.generate([FRANCE, [VOCAB]])
    assert not engine.built.core.has_work


@pytest.mark.parametrize("shape", ["array", "nested", "flat"])
def test_input_ids_forms(engine: Engine, shape: str) -> None:
    ids = engine.tokenizer.encode(FRANCE)
    given = {"array": np.array([ids]), "nested": [ids], "flat": ids}[shape]
    [answer] = engine.generate(
        input_ids=given, generation_config=GenerationConfig(max_new_tokens=2)
    )
    assert list(answer.token_ids) == FRANCE_GREEDY[:2]

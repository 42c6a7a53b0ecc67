"""Sampling and log-probabilities on real weights: the published reference values of SmolLM2."""

from pathlib import Path

import pytest

from swiftjax import Engine, GenerationConfig
from swiftjax.errors import InvalidRequestError

pytestmark = pytest.mark.demo_model

FRANCE = "The capital of France is"
FRANCE_IDS = (504, 3575, 282, 4649, 314)
PROMPT_LOGPROBS = [-11.5393, -0.3376, -2.4387, -0.4509]
PARIS, THE = 7042, 260


@pytest.fixture(scope="module")
def engine(demo_checkpoint: Path) -> Engine:
    return Engine(
        str(demo_checkpoint), max_batch_size=4, max_model_len=256, max_num_batched_tokens=32
    )


@pytest.mark.parametrize(
    ("mode", "temperature", "values"),
    [
        ("raw", 0.0, (-0.2581, -2.7408)),
        ("raw", 0.5, (-0.2581, -2.7408)),
        ("raw", 2.0, (-0.2581, -2.7408)),
        ("processed", 0.5, (-0.0081, -4.9734)),
        ("processed", 2.0, (-2.9530, -4.1944)),
    ],
)
def test_b016_top_logprobs(
    engine: Engine, mode: str, temperature: float, values: tuple[float, float]
) -> None:
    """Raw ones at any temperature and top_p; processed ones after the temperature."""
    config = GenerationConfig(
        max_new_tokens=1,
        logprobs=2,
        temperature=temperature,
        top_p=0.1,
        top_k=1,
        logprobs_mode=mode,
    )  # at temperature 2 two tokens share the first tenth, so top_k makes the draw certain
    [answer] = engine.generate(FRANCE, config)
    [[first, second]] = answer.choices[0].top_logprobs
    assert (first[0], second[0]) == (PARIS, THE) and answer.token_ids == (PARIS,)
    assert (first[1], second[1]) == pytest.approx(values, abs=0.01)
    assert answer.logprobs[0] == pytest.approx(values[0], abs=0.01)


def test_b017_penalties_see_prompt_and_output_rightly(engine: Engine) -> None:
    """Presence and frequency leave the prompt alone; repetition does not."""
    prompt = [[PARIS, PARIS, PARIS, 198, *FRANCE_IDS]]
    config = GenerationConfig(max_new_tokens=1, presence_penalty=2.0, frequency_penalty=2.0)
    [answer] = engine.generate(prompt, config)
    assert answer.token_ids == (PARIS,)
    assert answer.logprobs[0] == pytest.approx(-0.2856, abs=0.01)
    [answer] = engine.generate(prompt, GenerationConfig(max_new_tokens=1, repetition_penalty=2.0))
    assert answer.token_ids == (THE,)


@pytest.mark.parametrize("max_new_tokens", [0, 1])
def test_b054_echo_scores_the_prompt(engine: Engine, max_new_tokens: int) -> None:
    config = GenerationConfig(max_new_tokens=max_new_tokens, echo=True, logprobs=1)
    [answer] = engine.generate(FRANCE, config)
    assert answer.prompt_token_ids == FRANCE_IDS
    assert answer.prompt is not None and answer.prompt.logprobs[0] is None
    assert answer.prompt.logprobs[1:] == pytest.approx(PROMPT_LOGPROBS, abs=0.01)
    assert answer.prompt.top_logprobs[0] == () and len(answer.prompt.top_logprobs[4]) == 1
    assert answer.text == FRANCE + " Paris" * max_new_tokens
    assert answer.logprobs == pytest.approx([-0.2581] * max_new_tokens, abs=0.01)
    assert answer.finish_reason == "length"


def test_prompt_logprobs_do_not_lean_on_cached_pages(engine: Engine) -> None:
    """The same prompt twice, with other requests that do use the cache in between."""
    prompt = [list(range(1000, 1070))]
    config = GenerationConfig(max_new_tokens=2, prompt_logprobs=2)
    [cold] = engine.generate(prompt, config)
    engine.generate(prompt, GenerationConfig(max_new_tokens=2))
    [warm] = engine.generate(prompt, config)
    assert cold.prompt is not None and warm.prompt is not None
    assert len(warm.prompt.logprobs) == 70
    assert warm.prompt.logprobs[1:] == pytest.approx(cold.prompt.logprobs[1:], abs=1e-4)


def test_b015_n_choices(engine: Engine) -> None:
    """Four choices differ, repeat, and the first is what the seed alone would give."""
    config = GenerationConfig(n=4, seed=42, temperature=1.0, max_new_tokens=16, ignore_eos=True)
    [answer] = engine.generate(FRANCE, config)
    texts = [choice.token_ids for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) > 1 and all(len(t) == 16 for t in texts)
    [again] = engine.generate(FRANCE, config)
    assert [choice.token_ids for choice in again.choices] == texts
    alone = GenerationConfig(seed=42, temperature=1.0, max_new_tokens=16, ignore_eos=True)
    assert engine.generate(FRANCE, alone)[0].token_ids == texts[0]


def test_b019_logit_bias(engine: Engine) -> None:
    for bad in ({99999999: 5.0}, {-1: 5.0}, {PARIS: 100.5}):
        with pytest.raises(InvalidRequestError):
            engine.generate(FRANCE, GenerationConfig(max_new_tokens=1, logit_bias=bad))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        engine.generate(FRANCE, GenerationConfig(stop_token_ids=(49152,), min_new_tokens=1))
    config = GenerationConfig(max_new_tokens=1, logit_bias={PARIS: -100.0})
    assert engine.generate(FRANCE, config)[0].token_ids == (THE,)


def test_bans_and_allowances(engine: Engine) -> None:
    """Banned ids, bad words of several tokens, allowed ids, and stop ids before their time."""
    config = GenerationConfig(max_new_tokens=1, banned_token_ids=(PARIS,))
    assert engine.generate(FRANCE, config)[0].token_ids == (THE,)
    config = GenerationConfig(max_new_tokens=2, bad_words_ids=((PARIS, 30),))
    tokens = engine.generate(FRANCE, config)[0].token_ids
    assert tokens[0] == PARIS and tokens[1] != 30
    config = GenerationConfig(max_new_tokens=6, allowed_token_ids=(THE, 30))
    assert set(engine.generate(FRANCE, config)[0].token_ids) <= {THE, 30}
    config = GenerationConfig(max_new_tokens=9, stop_token_ids=(30,), min_new_tokens=4)
    answer = engine.generate(FRANCE, config)[0]
    assert 30 not in answer.token_ids[:4] and len(answer.token_ids) >= 5

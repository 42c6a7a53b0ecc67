"""What a blocking Engine is told besides prompts: warm-up, policies, and options of requests."""

from pathlib import Path
from typing import Any

import pytest

from swiftjax import (
    Engine,
    EngineConfig,
    GenerationConfig,
    RequestOptions,
    build,
    start_async_engine,
)
from swiftjax.errors import InvalidRequestError
from tests.tiny_checkpoints import tiny_config, write_checkpoint

FOUR = GenerationConfig(max_new_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", tiny_config())


def make_engine(checkpoint: Path, **arguments: Any) -> Engine:
    """An engine of few and small steps."""
    sizes: dict[str, Any] = {"max_batch_size": 1, "max_num_batched_tokens": 16, "max_model_len": 64}
    return Engine(str(checkpoint), max_total_token_num=128, page_size=4, **sizes | arguments)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return make_engine(checkpoint, policy="priority")


def test_without_warm_up_only_what_is_needed_is_compiled(checkpoint: Path) -> None:
    cold, warm = make_engine(checkpoint), make_engine(checkpoint, warm_up=True)
    assert cold.built.runner.num_compiles == 0
    before = warm.built.runner.num_compiles
    answers = [engine.generate([[1, 2, 3]], FOUR)[0].token_ids for engine in (cold, warm)]
    assert answers[0] == answers[1]
    assert 0 < cold.built.runner.num_compiles < before == warm.built.runner.num_compiles
    # Swap is there once it was measured, with or without a whole warm-up.
    assert warm.built.core.scheduler.preemption.costs.seconds_per_page > 0
    assert cold.built.core.scheduler.preemption.costs.host_pages == 0
    cold.built.measure_swap()
    assert cold.built.core.scheduler.preemption.costs.host_pages > 0
    assert cold.generate([[1, 2, 3]], FOUR)[0].token_ids == answers[0]


def test_prompts_in_groups_are_answered_with_the_same_tokens(checkpoint: Path) -> None:
    prompts = [[i, *range(3, 3 + 5 * i % 17)] for i in range(1, 9)]
    answers = []
    for group_prompts in (None, True, False):
        given = {} if group_prompts is None else {"group_prompts": group_prompts}
        engine = make_engine(checkpoint, max_batch_size=4, **given)
        assert engine.built.core.scheduler.config.group_prompts == (group_prompts is not False)
        answers.append([answer.token_ids for answer in engine.generate(prompts, FOUR)])
    assert answers[0] == answers[1] == answers[2]


def test_cached_tokens_are_reported(engine: Engine) -> None:
    prompt = list(range(1, 12))
    counts = [engine.generate([prompt], FOUR)[0].num_cached_tokens for _ in range(2)]
    salted = engine.generate([prompt], FOUR, options=RequestOptions(cache_salt="mine"))
    assert (*counts, salted[0].num_cached_tokens) == (0, 8, 0)


def test_priority_decides_who_starts_first(engine: Engine) -> None:
    for priority in (0, 5, -5):
        options = RequestOptions(priority=priority)
        engine.add_request([1, 2], FOUR, options=options, request_id=str(priority))
    order = []
    while len(order) < 3:
        engine.step()
        order += [output.id for output in engine.get_completed_requests()]
    assert order == ["5", "0", "-5"]


def test_prompts_that_are_refused_leave_the_request_whose_id_they_met(engine: Engine) -> None:
    # What the second of the next prompts will be called.
    taken = f"request-{next(engine._maker._ids) + 2}"
    engine.add_request([1, 2], GenerationConfig(max_new_tokens=2), request_id=taken)
    with pytest.raises(InvalidRequestError, match="already in use"):
        engine.generate([[3], [4]])
    while not engine.is_request_finished(taken):
        engine.step()
    assert [answer.id for answer in engine.get_completed_requests()] == [taken]


def test_time_limit_ends_with_what_there_is(engine: Engine) -> None:
    options = RequestOptions(time_limit=1e-6)
    [answer] = engine.generate([[1, 2]], FOUR, options=options)
    assert (answer.finish_reason, answer.token_ids) == ("time_limit", ())
    with pytest.raises(InvalidRequestError, match="request_id contains the control character"):
        engine.add_request([1], FOUR, request_id="a\nb")


def test_a_model_length_beyond_the_model_names_the_remedy(checkpoint: Path) -> None:
    config = EngineConfig(model_path=str(checkpoint), max_model_len=999_999)
    with pytest.raises(InvalidRequestError, match=r"999999.*lower it to that or leave it out"):
        start_async_engine(config)


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_cache_is_taken_before_the_first_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, warm_up: bool
) -> None:
    """Where it fails then, no request is left behind."""

    def fail(*_: object, **__: object) -> None:
        raise InvalidRequestError("no room")

    monkeypatch.setattr(build, "make_state", fail)
    with pytest.raises(InvalidRequestError, match="no room"):
        make_engine(checkpoint, warm_up=warm_up)

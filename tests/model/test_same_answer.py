"""The same request gives the same answer: preempted, swapped, chunked, cold or warm cache."""

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from swiftjax.engine.choices import derive_seed
from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from tests.fakes import make_request, run_to_end
from tests.model.test_engine_numerics import prompt_of
from tests.tiny import tiny_core

ALWAYS_SWAP = PreemptionCosts(host_pages=100, seconds_per_token=1.0)
GREEDY = GenerationConfig(max_new_tokens=30)
SEEDED = GenerationConfig(max_new_tokens=30, temperature=1.0, seed=7)


def answers(
    core: EngineCore,
    prompts: list[list[int]],
    preempt_every: int = 0,
    configs: Iterable[GenerationConfig] = (GREEDY, SEEDED),
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities per prompt, the configurations taken in turn.

    Optionally one sequence is preempted every so many steps.
    """
    turns = itertools.cycle(configs)
    requests = [make_request(core, *pair) for pair in zip(prompts, turns, strict=False)]
    results: dict[str, tuple[list[int], list[float]]] = {r.request_id: ([], []) for r in requests}
    for request in requests:
        core.submit(request)
    steps = 0
    while core.has_work:
        steps += 1
        if preempt_every and steps % preempt_every == 0:
            core.scheduler.preemption.preempt_next()
        for output in core.step():
            results[output.request_id][0].extend(output.token_ids)
            results[output.request_id][1].extend(output.logprobs)
        core.scheduler.check_integrity()
    assert core.stats().num_free_pages == core.stats().num_pages
    return [results[r.request_id] for r in requests]


def assert_same(
    got: list[tuple[list[int], list[float]]], want: list[tuple[list[int], list[float]]]
) -> None:
    for (tokens, logprobs), (want_tokens, want_logprobs) in zip(got, want, strict=True):
        assert tokens == want_tokens
        np.testing.assert_allclose(logprobs, want_logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def roomy() -> EngineCore:
    return tiny_core(num_pages=20, prefix_cache=False)


@pytest.mark.parametrize("chunk", [8, 1024])
@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_b046_preemption_changes_nothing(roomy: EngineCore, chunk: int, swap: bool) -> None:
    """Seven pages for two sequences that need five each: same tokens, log-probabilities, order."""
    prompts = [prompt_of(37, 1), prompt_of(37, 2)]
    want = answers(roomy, prompts)
    core = tiny_core(
        num_pages=7,
        max_num_batched_tokens=chunk,
        prefix_cache=False,
        costs=ALWAYS_SWAP if swap else None,
    )
    assert_same(answers(core, prompts), want)
    natural = core.scheduler.num_preemptions
    assert natural >= 1
    assert_same(answers(core, prompts, preempt_every=3), want)
    assert core.scheduler.num_preemptions > natural + 5


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_overlapped_steps_change_nothing(roomy: EngineCore, swap: bool) -> None:
    """Unread tokens, penalty counts and seeds stay on the device; natural and forced preemption."""
    prompts = [prompt_of(37, 1), prompt_of(37, 2), prompt_of(5, 3)]
    penalised = [GenerationConfig(max_new_tokens=20, repetition_penalty=1.3), SEEDED, GREEDY]
    want = answers(roomy, prompts), answers(roomy, prompts, configs=penalised)
    costs = ALWAYS_SWAP if swap else None
    core = tiny_core(num_pages=7, prefix_cache=False, costs=costs, overlaps=True)
    for preempt_every in (0, 3):
        assert_same(answers(core, prompts, preempt_every), want[0])
        assert_same(answers(core, prompts, preempt_every, configs=penalised), want[1])
    assert core.scheduler.num_preemptions > 5


def test_cold_and_warm_prefix_cache_give_the_same(roomy: EngineCore) -> None:
    prompts = [prompt_of(37, 1), [*prompt_of(37, 1)[:33], 5, 6], prompt_of(16, 3)]
    want = answers(roomy, prompts)
    core = tiny_core(num_pages=40)
    assert_same(answers(core, prompts), want)  # the second shares the first one's pages
    assert_same(answers(core, prompts), want)  # warm
    assert core.scheduler.pool.num_idle > 0


def test_p19_salts_never_share_pages() -> None:
    core = tiny_core(num_pages=40)
    for salt in ("a", "b"):
        core.submit(make_request(core, prompt_of(64), GREEDY, cache_salt=salt))
    plan = core.scheduler.schedule(0.0)
    assert [w.start for w in plan.work] == [0]  # the budget is 64: the first fills the step
    core2 = tiny_core(num_pages=40, max_num_batched_tokens=256)
    for salt in ("a", "b", "a"):
        core2.submit(make_request(core2, prompt_of(64), GREEDY, cache_salt=salt))
    assert [w.start for w in core2.scheduler.schedule(0.0).work] == [0, 0, 48]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("pages", [12, 40], ids=["short of pages", "roomy"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_choices_are_what_separate_requests_would_be(
    roomy: EngineCore, temperature: float, pages: int, prefix_cache: bool
) -> None:
    """Forked from one prompt, with a copied page each: as if every choice had come alone."""
    prompt, config = prompt_of(37, 1), GenerationConfig(max_new_tokens=30, temperature=temperature)
    want = []
    for index in range(4):
        alone = make_request(roomy, prompt, config, seed=derive_seed(7, index), request_id="alone")
        roomy.submit(alone)
        want.append(run_to_end(roomy)["alone"])
    core = tiny_core(num_pages=pages, prefix_cache=prefix_cache, costs=ALWAYS_SWAP)
    several = dataclasses.replace(config, n=4)
    core.submit(make_request(core, prompt, several, seed=7, request_id="all"))
    tokens: list[list[int]] = [[] for _ in range(4)]
    while core.has_work:
        for output in core.step():
            tokens[output.index] += output.token_ids
        core.scheduler.check_integrity()
    assert tokens == want
    assert (core.scheduler.num_preemptions > 0) == (pages == 12)

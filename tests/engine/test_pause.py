"""Paused requests: they cost nobody a place, and they lose nothing."""

import math
import random

import pytest

from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from tests.fakes import ContextRunner, context_hash, count_up, make_fake_core, make_request

TEN = GenerationConfig(max_new_tokens=10)


def steps(core: EngineCore, count: int) -> dict[str, list[int]]:
    """What a number of steps gives each request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(count):
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        core.scheduler.check_integrity()
    return tokens


def test_a_paused_request_gives_up_its_place_and_goes_on_later() -> None:
    core = make_fake_core(max_num_seqs=1)
    core.submit(make_request(core, [5], TEN, request_id="slow"))
    core.submit(make_request(core, [50], TEN, request_id="next"))
    assert steps(core, 4) == {"slow": [6, 7, 8, 9]}
    core.pause("slow")
    assert steps(core, 10) == {"next": count_up(50, 10, 100)}
    assert core.has_work and core.seconds_to_work() == math.inf
    assert core.stats().num_free_pages == core.stats().num_pages
    core.resume("slow")
    assert core.seconds_to_work() == 0.0
    assert steps(core, 6) == {"slow": [10, 11, 12, 13, 14, 15]}
    assert not core.has_work


def test_a_paused_request_keeps_its_deadline_and_can_be_aborted() -> None:
    now = [0.0]
    core = make_fake_core(clock=lambda: now[0])
    core.submit(make_request(core, [5], TEN, request_id="a", deadline=9.0))
    core.submit(make_request(core, [5], TEN, request_id="b"))
    core.step()
    core.pause("a")
    core.pause("b")
    assert core.step() == [] and core.seconds_to_work() == 9.0
    core.abort("b")
    assert [(o.request_id, o.finish_reason) for o in core.step()] == [("b", "abort")]
    now[0] = 9.0
    assert [(o.request_id, o.finish_reason) for o in core.step()] == [("a", "time_limit")]
    assert not core.has_work
    core.scheduler.check_integrity()


def test_all_choices_pause_those_that_wait_too() -> None:
    core = make_fake_core(max_num_seqs=2)
    config = GenerationConfig(max_new_tokens=5, n=4)
    core.submit(make_request(core, [5], config, request_id="a"))
    core.step()
    core.pause("a")
    assert core.step() == [] and core.stats().num_running == 0
    core.resume("a")
    outputs = [output for _ in range(20) for output in core.step()]
    assert sum(output.finish_reason == "length" for output in outputs) == 4
    assert not core.has_work


def test_pausing_what_is_unknown_or_finished_does_nothing() -> None:
    core = make_fake_core()
    core.pause("nobody")
    core.submit(make_request(core, [5], TEN, request_id="a"))
    steps(core, 10)
    core.pause("a")
    core.resume("a")
    assert core.seconds_to_work() == math.inf
    core.scheduler.check_integrity()


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("seed", range(4))
def test_pauses_at_random_moments_change_no_token(seed: int, overlaps: bool) -> None:
    rng = random.Random(seed)
    runner = ContextRunner(53, 12, 4)
    core = make_fake_core(
        vocab_size=53, num_pages=12, page_size=4, max_num_seqs=3, runner=runner, overlaps=overlaps,
        costs=PreemptionCosts(host_pages=6, seconds_per_page=1.0, seconds_per_token=1.0),
    )  # fmt: skip
    expected: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    for i in range(400):
        action = rng.random()
        name = rng.choice([*(n for n in got if len(got[n]) < 12), "nobody"])
        if action < 0.08 and i < 300:
            prompt = [rng.randrange(53) for _ in range(rng.randrange(1, 12))]
            request = make_request(core, prompt, GenerationConfig(max_new_tokens=12))
            core.submit(request)
            tokens = list(prompt)
            for _ in range(12):
                tokens.append(context_hash(tokens, 53))
            expected[request.request_id], got[request.request_id] = tokens[len(prompt) :], []
        elif action < 0.25:
            core.pause(name)
        elif action < 0.4:
            core.resume(name)
        else:
            for name, tokens in steps(core, 1).items():
                got[name] += tokens
    for name in expected:
        core.resume(name)
    while core.has_work:
        for name, tokens in steps(core, 1).items():
            got[name] += tokens
    assert got == expected
    assert core.scheduler.num_preemptions > 10

"""Streaming and ordinary requests at random, over a runner that reads every page it is told of."""

import random

import pytest

from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig, Request
from swiftjax.engine.streaming import Streaming
from tests.fakes import ContextRunner, context_oracle, make_fake_core, make_request

VOCAB, PAGES, PAGE = 50, 30, 4
COSTS = PreemptionCosts(host_pages=20, seconds_per_page=1.0, seconds_per_token=0.3)
KINDS = (
    Streaming(sink=4, window=13),
    Streaming(sink=0, window=1),
    Streaming(sink=6, window=20),
    None,
)


def disturb(core: EngineCore, draw: random.Random, names: list[str]) -> set[str]:
    """Do something to somebody, or nothing; who was aborted."""
    some, aborted = draw.choice(names), set()
    match draw.randrange(12):
        case 0:
            core.scheduler.preemption.preempt_next()
        case 1:
            core.pause(some)
        case 2 if draw.randrange(4) == 0 and some in core.scheduler:
            core.abort(some)
            aborted.add(some)
    for name in names:
        if draw.randrange(4) == 0:
            core.resume(name)
    return aborted


def draw_request(core: EngineCore, draw: random.Random) -> Request:
    streaming = draw.choice(KINDS)
    prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 120 if streaming else 40))]
    count = draw.randrange(1, 90 if streaming else 18)
    config = GenerationConfig(max_new_tokens=count, streaming=streaming)
    return make_request(core, prompt, config)


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("seed", range(4))
def test_no_page_leaves_too_early_or_comes_back_wrong(seed: int, overlaps: bool) -> None:
    draw = random.Random(seed)
    runner = ContextRunner(VOCAB, PAGES, PAGE)
    core = make_fake_core(
        vocab_size=VOCAB,
        num_pages=PAGES,
        page_size=PAGE,
        max_model_len=60,
        max_num_batched_tokens=draw.choice([7, 40]),
        costs=COSTS,
        runner=runner,
        overlaps=overlaps,
        streams=True,
    )
    asked, answers, aborted = {}, {}, set()
    num_dropped = num_swapped = 0
    while core.has_work or len(asked) < 60:
        if len(asked) < 60 and core.stats().num_waiting < 3:
            request = draw_request(core, draw)
            core.submit(request)
            asked[request.request_id] = request
            answers[request.request_id] = []
        aborted |= disturb(core, draw, list(asked))
        for output in core.step():
            answers[output.request_id] += output.token_ids
        core.scheduler.check_integrity()
        num_swapped += len(runner.swapped)
        num_dropped += sum(s.num_dropped > 0 for s in core.scheduler.sequences.running.values())
    assert num_dropped > 100 and core.scheduler.num_preemptions > 10 and num_swapped
    assert core.stats().num_free_pages == PAGES and not runner.host
    for name, request in asked.items():
        config = request.generation
        want = context_oracle(
            list(request.prompt_token_ids), request.max_new_tokens, VOCAB, 0, config.streaming
        )
        got = answers[name]
        assert got == (want[: len(got)] if name in aborted else want)

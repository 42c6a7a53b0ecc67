"""Streaming and ordinary requests at random, over a runner that reads every page it is told of."""

import gc
import random
import sys
import tracemalloc
from collections import Counter
from typing import NamedTuple

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


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
def test_a_token_takes_no_more_work_far_into_a_text(overlaps: bool) -> None:
    """In calls of functions, and in memory, which shows what a single call copies."""
    core = make_fake_core(page_size=PAGE, streams=True, prefix_cache=False, overlaps=overlaps)
    config = GenerationConfig(max_new_tokens=2000, streaming=KINDS[0])
    core.submit(make_request(core, [1], config))
    near = work_of_steps(core, skipped=100)
    far = work_of_steps(core, skipped=1800)
    assert far.calls == near.calls
    assert far.num_bytes < near.num_bytes + 2000  # a copy of the text has 8 for each token


class StepWork(NamedTuple):
    """Calls in as many steps as fill a page, and the memory that the leanest of them needed."""

    calls: int
    num_bytes: int


def work_of_steps(core: EngineCore, skipped: int) -> StepWork:
    """Look at steps after so many others."""
    for _ in range(skipped):
        core.step()
    calls = Counter[str]()
    gc.disable()  # jax has a function that is called then
    tracemalloc.start()
    peaks = []
    for _ in range(PAGE):
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        sys.setprofile(lambda frame, event, argument: calls.update([event]))
        core.step()
        sys.setprofile(None)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    gc.enable()
    return StepWork(calls["call"] + calls["c_call"], min(peaks))

"""Streaming requests through the whole engine: same text in any company, a few pages for ever."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swiftjax.build import check_streaming
from swiftjax.config import EngineConfig
from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError, UnsupportedError
from swiftjax.model_config import RopeConfig
from tests.fakes import make_request
from tests.model.test_engine_numerics import prompt_of
from tests.model.test_same_answer import ALWAYS_SWAP, answers, assert_same
from tests.numpy_streaming import streaming_logits
from tests.tiny import TINY, tiny_core, tiny_params

STREAMING = Streaming(sink=4, window=21)
GREEDY = GenerationConfig(max_new_tokens=60, streaming=STREAMING)
SEEDED = replace(GREEDY, temperature=1.0, seed=7, streaming=Streaming(sink=2, window=30))
PLAIN = GenerationConfig(max_new_tokens=20)
CONFIGS = (GREEDY, SEEDED, PLAIN)
PROMPTS = [prompt_of(150, 1), prompt_of(9, 2), prompt_of(30, 3)]  # the first is over max_model_len


def streaming_core(
    *,
    num_pages: int = 100,
    chunk: int = 64,
    costs: PreemptionCosts | None = None,
    overlaps: bool = False,
    prefix_cache: bool = False,
) -> EngineCore:
    return tiny_core(
        num_pages=num_pages,
        page_size=4,
        max_model_len=100,
        max_num_batched_tokens=chunk,
        costs=costs,
        overlaps=overlaps,
        prefix_cache=prefix_cache,
        streams=True,
    )


def test_tokens_and_scores_are_those_of_the_papers_rule() -> None:
    ((tokens, logprobs),) = answers(streaming_core(), PROMPTS[:1], configs=(GREEDY,))
    ids = PROMPTS[0] + tokens
    logits = streaming_logits(TINY, tiny_params(), ids[:-1], STREAMING)[len(PROMPTS[0]) - 1 :]
    assert tokens == logits.argmax(axis=1).tolist()
    scores = logits.max(axis=1) - np.log(np.exp(logits).sum(axis=1))
    np.testing.assert_allclose(logprobs, scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("costs", [None, ALWAYS_SWAP], ids=["recompute", "swap"])
def test_company_chunks_and_preemption_change_nothing(
    costs: PreemptionCosts | None, overlaps: bool
) -> None:
    want = [
        answers(streaming_core(), [prompt], configs=(config,))[0]
        for prompt, config in zip(PROMPTS, CONFIGS, strict=True)
    ]
    core = streaming_core(num_pages=30, chunk=16, costs=costs, overlaps=overlaps)
    assert_same(answers(core, PROMPTS, preempt_every=7, configs=CONFIGS), want)
    assert core.scheduler.num_preemptions > 3
    cached = streaming_core(prefix_cache=True, chunk=32, costs=costs, overlaps=overlaps)
    for _ in range(2):
        assert_same(answers(cached, PROMPTS, preempt_every=9, configs=CONFIGS), want)


def test_what_was_computed_after_tokens_were_forgotten_is_not_shared() -> None:
    core = streaming_core(prefix_cache=True)
    short = replace(GREEDY, max_new_tokens=2)
    prompt = PROMPTS[0][:90]
    want = answers(streaming_core(), [prompt], configs=(PLAIN,))
    answers(core, [prompt], configs=(short,))
    request = make_request(core, prompt, PLAIN)
    core.submit(request)
    outputs = []
    while core.has_work:
        outputs += core.step()
    shared = STREAMING.shared_len() // 4 * 4
    assert max(output.num_cached_tokens for output in outputs) == shared
    assert [token for output in outputs for token in output.token_ids] == want[0][0]


def test_three_thousand_tokens_take_constant_pages_time_and_memory() -> None:
    core = streaming_core(overlaps=True)
    core.submit(make_request(core, PROMPTS[0], replace(GREEDY, max_new_tokens=3000)))
    in_use, sizes, times, count = [], [], [], 0
    while core.has_work:
        start = time.process_time()
        count += sum(len(output.token_ids) for output in core.step())
        times.append(time.process_time() - start)
        stats = core.stats()
        in_use.append(stats.num_pages - stats.num_free_pages)
        if count and count % 500 == 0:
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert count == 3000
    sinks, window = STREAMING.sink_pages(4), -(-STREAMING.window // 4)
    assert set(in_use[50:-10]) <= {sinks + window, sinks + window + 1}
    assert max(in_use) <= STREAMING.most_pages(4)
    assert sizes[-1] - sizes[1] < 1000  # pages of 4 KiB
    # Of 500 steps the 50 fastest are those that nothing else on the machine slowed down.
    early, late = (sorted(times[i : i + 500])[50] for i in (500, 2500))
    assert late < 1.5 * early


def test_an_abort_gives_all_pages_back() -> None:
    core = streaming_core(overlaps=True)
    request = make_request(core, PROMPTS[0], replace(GREEDY, max_new_tokens=1000))
    core.submit(request)
    for _ in range(40):
        core.step()
    core.abort(request.request_id)
    while core.has_work:
        core.step()
    assert core.stats().num_free_pages == core.stats().num_pages
    core.scheduler.check_integrity()


def test_what_cannot_be_is_refused_with_a_remedy() -> None:
    core = streaming_core()
    with pytest.raises(InvalidRequestError, match=r"at most 100: lower the window by \d+"):
        core.submit(make_request(core, [1, 2], replace(GREEDY, streaming=Streaming(window=200))))
    with pytest.raises(InvalidRequestError, match="start it with --streaming"):
        make_request(tiny_core(), [1, 2], GREEDY)
    with pytest.raises(InvalidRequestError, match="with streaming it must be 1"):
        GenerationConfig(n=2, streaming=STREAMING)
    with pytest.raises(InvalidRequestError, match="window of streaming is 0"):
        Streaming(window=0)
    for option in ({"trace": "file"}, {"deterministic": True}):
        with pytest.raises(InvalidRequestError, match="leave one of the two out"):
            EngineConfig(model_path="m", streaming=True, **option)
    with pytest.raises(UnsupportedError, match="leave streaming out"):
        check_streaming(replace(TINY, rope=RopeConfig(kind="dynamic")))
    core.limits = core.limits._replace(windows=(23,))
    with pytest.raises(InvalidRequestError, match="of at most 19, or of 23 and more"):
        core.submit(make_request(core, [1, 2], GREEDY))

"""Sampling in the engine of a tiny model: nothing compiles late, preemption loses nothing."""

import numpy as np

from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from tests.compiles import no_compiles
from tests.fakes import make_request, run_to_end
from tests.tiny import TINY, tiny_core

MIXES = (
    {"logprobs": 3},
    {"logprobs": 1, "echo": True},
    {"prompt_logprobs": 0, "temperature": 1.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 0.8},
    {"n": 3, "temperature": 1.0},
    {"logit_bias": {5: 3.0}, "banned_token_ids": (7,), "min_p": 0.1, "temperature": 1.0},
    {"allowed_token_ids": (3, 4, 5), "logprobs": 20, "logprobs_mode": "processed"},
    {"typical_p": 0.7, "temperature": 1.0, "presence_penalty": 1.0},
    {},
)


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, TINY.vocab_size, length).tolist()


def test_b063_no_compilation_after_warm_up() -> None:
    """Any prompt, batch, sampler, choice, preemption and swap: XLA is not asked for anything."""
    swap = PreemptionCosts(host_pages=16, seconds_per_page=1.0, seconds_per_token=0.2)
    core = tiny_core(
        num_pages=48, page_size=8, max_num_seqs=9, max_num_batched_tokens=317, costs=swap,
        overlaps=True,
    )  # fmt: skip
    runner = core._runner
    runner.warm_up(core._buckets.all)  # type: ignore[attr-defined]
    count = runner.num_compiles  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    with no_compiles():
        for length in range(1, 71):
            mix = MIXES[int(rng.integers(len(MIXES)))]
            config = GenerationConfig(max_new_tokens=int(rng.integers(1, 9)), **mix)
            core.submit(make_request(core, prompt_of(length), config))
            if length % 5 == 0:
                core.scheduler.preemption.preempt_next()
            core.step()
        run_to_end(core)
    assert runner.num_compiles == count  # type: ignore[attr-defined]
    assert core.scheduler.num_preemptions > 10
    assert max(b.num_tokens for b in core._buckets.mixed) == 317


def test_b017_preemption_keeps_counts_and_prompt_scores() -> None:
    """Preempted half way, the same tokens and scores come out."""
    config = GenerationConfig(
        max_new_tokens=12, repetition_penalty=1.5, frequency_penalty=1.0, prompt_logprobs=1
    )

    def run(preempt: bool) -> tuple[list[int], tuple[float | None, ...]]:
        core = tiny_core(max_num_batched_tokens=16)
        other = make_request(core, prompt_of(8), GenerationConfig(max_new_tokens=30))
        me = make_request(core, prompt_of(40), config)
        core.submit(other)
        core.submit(me)
        tokens: list[int] = []
        scores: tuple[float | None, ...] = ()
        for step in range(200):
            if preempt and step in (2, 8):
                core.scheduler.preemption.preempt_next()
            for output in core.step():
                if output.request_id == me.request_id:
                    tokens += output.token_ids
                    scores = output.prompt.logprobs if output.prompt else scores
            if not core.has_work:
                break
        return tokens, scores

    tokens, scores = run(False)
    again, again_scores = run(True)
    assert len(tokens) == 12 and again == tokens
    assert len(scores) == 40 and scores[0] is None
    np.testing.assert_allclose(again_scores[1:], scores[1:], atol=1e-4)

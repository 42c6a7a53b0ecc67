"""Deterministic mode: an answer is equal bit for bit, whatever runs beside it.

On a CPU every step runs in one program. On a Hopper GPU, where this file runs too, steps have
several sizes: of a 1B model in bfloat16, of 256 rows. `tests/gpu` compares norms of heads from one
row on, and plain products of 128 rows and more; smaller batches are not compared there.
"""

import jax
import pytest

from swiftjax.api import Engine
from swiftjax.build import build_core
from swiftjax.config import EngineConfig
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from tests.model.test_engine_numerics import prompt_of

ON_GPU = jax.default_backend() == "gpu"
SHAPE, LENGTH, OTHERS = ("llama3-1b", 900, 255) if ON_GPU else ("tiny", 60, 7)
WATCHED = GenerationConfig(max_new_tokens=24, ignore_eos=True, logprobs=3)
SEEDED = GenerationConfig(max_new_tokens=24, ignore_eos=True, temperature=1.0, top_p=0.9, seed=5)

pytestmark = [pytest.mark.gpu] if ON_GPU else []
Answer = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(
        model_path=SHAPE, load_format="dummy", deterministic=True, max_batch_size=OTHERS + 1,
        max_num_batched_tokens=2048 if ON_GPU else 64, max_model_len=1024 if ON_GPU else 128,
        swap_space_gib=0.0,
    )  # fmt: skip
    return Engine.from_core(build_core(config))


def _answers(engine: Engine, others: int = 0, preempt_every: int = 0) -> list[Answer]:
    """Tokens and log-probabilities of two watched requests among others."""
    prompts = [prompt_of(LENGTH, 1), prompt_of(LENGTH // 3, 2)]
    ids = [engine.add_request(prompts[0], WATCHED)]
    for i in range(others - 1):
        penalised = GenerationConfig(max_new_tokens=5 + i % 30, repetition_penalty=1.2)
        engine.add_request(prompt_of(5 + 7 * i % LENGTH, 10 + i), penalised)
    ids.append(engine.add_request(prompts[1], SEEDED))
    done, steps = {}, 0
    scheduler = engine.built.core.scheduler
    while not done.keys() >= set(ids):
        steps += 1
        if preempt_every and steps % preempt_every == 0:
            scheduler.preemption.preempt_next()
        engine.step()
        done |= {answer.request_id: answer for answer in engine.get_completed_requests()}
    while engine.built.core.has_work:
        engine.step()
    engine.get_completed_requests()
    scheduler.pool.forget_published()
    return [(done[i].token_ids, done[i].logprobs) for i in ids]


def test_bit_equal_in_any_company(engine: Engine) -> None:
    want = _answers(engine)
    scheduler = engine.built.core.scheduler
    assert _answers(engine, others=OTHERS) == want
    normal = scheduler.config
    try:
        for chunk in (512, 100) if ON_GPU else (16, 7):
            object.__setattr__(normal, "max_num_batched_tokens", chunk)
            assert _answers(engine, others=3) == want
    finally:
        object.__setattr__(normal, "max_num_batched_tokens", 2048 if ON_GPU else 64)
    assert _answers(engine, others=3, preempt_every=5) == want  # computed again
    scheduler.preemption.costs = PreemptionCosts(host_pages=10_000, seconds_per_token=1.0)
    assert _answers(engine, others=3, preempt_every=5) == want  # swapped
    engine.generate([prompt_of(LENGTH, 1)], WATCHED)
    assert scheduler.pool.num_idle > 0  # warm prefix cache
    assert _answers(engine) == want


def test_bit_equal_whichever_sampler_a_batch_needs(engine: Engine) -> None:
    """Alone each is served by a sampler of its own, beside a penalised request all by one."""
    greedy = GenerationConfig(max_new_tokens=9, ignore_eos=True)
    plain = GenerationConfig(max_new_tokens=9, ignore_eos=True, temperature=1.0, seed=6)
    penalised = GenerationConfig(max_new_tokens=20, ignore_eos=True, repetition_penalty=1.2)
    prompts = [prompt_of(20, 30 + i) for i in range(4)]
    configs = [greedy, plain, SEEDED, penalised]
    pairs = list(zip(prompts, configs, strict=True))
    alone = [engine.generate([prompt], config)[0] for prompt, config in pairs]
    ids = [engine.add_request(prompt, config) for prompt, config in pairs]
    while engine.built.core.has_work:
        engine.step()
    together = {answer.request_id: answer for answer in engine.get_completed_requests()}
    for request_id, one in zip(ids, alone, strict=True):
        other = together[request_id]
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)

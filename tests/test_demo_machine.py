"""The state machine of tests/engine over real weights: SmolLM2 in float32, short of pages."""

import dataclasses
import functools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from swiftjax.config import SchedulerConfig
from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from tests.demo import BUDGET, core_over
from tests.engine.engine_machine import EngineMachine
from tests.fakes import make_request, run_to_end

pytestmark = pytest.mark.demo_model

PAGES = 8
COSTS = PreemptionCosts(host_pages=6, seconds_per_page=1.0, seconds_per_token=0.3)
COUNT = (33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28)  # 1, 2, 3, 4, 5,
FRANCE = (504, 3575, 282, 4649, 314)  # The capital of France is
PROMPTS = (COUNT, COUNT[:8], (*COUNT, 216, 38, 28), FRANCE, (*COUNT[:11], *FRANCE))


@functools.cache
def alone(checkpoint: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """The answer of an engine that does nothing else."""
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=BUDGET, prefix_cache=False)
    core = core_over(checkpoint, config, PreemptionCosts(), False)
    request = make_request(core, list(prompt), GenerationConfig(max_new_tokens=count))
    core.submit(request)
    return run_to_end(core)[request.request_id]


class DemoMachine(EngineMachine):
    """Eight pages for prompts of up to 17 tokens and answers of up to 9."""

    max_new_tokens = 9
    checkpoint = ""

    def make_core(self, config: SchedulerConfig, *, overlaps: bool) -> EngineCore:
        budget = min(config.max_num_batched_tokens, BUDGET)
        config = dataclasses.replace(config, max_num_batched_tokens=budget)
        return core_over(
            self.checkpoint, config, COSTS, overlaps, num_pages=PAGES, clock=self.clock
        )

    def draw_prompt(self, data: st.DataObject) -> list[int]:
        return list(data.draw(st.sampled_from(PROMPTS)))

    def answer(self, prompt: list[int], count: int, index: int) -> list[int]:
        return alone(self.checkpoint, tuple(prompt), self.max_new_tokens)[:count]


def test_the_machine_over_real_weights(demo_checkpoint: Path) -> None:
    DemoMachine.checkpoint = str(demo_checkpoint)
    for prompt in PROMPTS:  # now: the machine's pages lie in the same cache
        alone(str(demo_checkpoint), prompt, DemoMachine.max_new_tokens)
    run_state_machine_as_test(
        DemoMachine,
        settings=settings(
            max_examples=15,
            stateful_step_count=10,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
    assert DemoMachine.num_steps > 30

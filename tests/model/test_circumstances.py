"""The same request gives the same answer, whatever happens around it: a tiny LLaMA in float32."""

import pytest

from swiftjax.config import SchedulerConfig
from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from tests import same_answer
from tests.model.test_engine_numerics import prompt_of
from tests.same_answer import CIRCUMSTANCES, MAX_SEQS, Answer, Ask
from tests.tiny import tiny_core

ASKS: list[Ask] = [
    (prompt_of(37, 1), GenerationConfig(max_new_tokens=20)),
    (prompt_of(21, 2), GenerationConfig(max_new_tokens=20, temperature=1.0, seed=42)),
    ([*prompt_of(37, 1)[:33], 5, 6], GenerationConfig(max_new_tokens=20)),
]


def make_core(config: SchedulerConfig, costs: PreemptionCosts, overlaps: bool) -> EngineCore:
    return tiny_core(
        num_pages=20, page_size=16, max_model_len=96, max_num_seqs=MAX_SEQS, costs=costs,
        max_num_batched_tokens=config.max_num_batched_tokens, prefix_cache=config.prefix_cache,
        overlaps=overlaps,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    return same_answer.alone(make_core, ASKS)


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_p17_b015_b046_same_answer(alone: list[Answer], name: str) -> None:
    same_answer.assert_same(same_answer.run(make_core, ASKS, CIRCUMSTANCES[name]), alone, 1e-4)


@pytest.mark.parametrize("ask", ASKS[:2], ids=["greedy", "seeded"])
def test_same_shapes_agree_more_closely(ask: Ask) -> None:
    same_answer.assert_same_shapes_agree(make_core, [ask])

"""The same request gives the same answer, whatever happens around it: SmolLM2 in float32."""

import functools
from pathlib import Path

import pytest

from swiftjax.engine.request import GenerationConfig
from tests import same_answer
from tests.demo import core_over
from tests.same_answer import CIRCUMSTANCES, Answer, Ask, MakeCore

pytestmark = pytest.mark.demo_model

COUNT = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]  # 1, 2, 3, 4, 5,
FRANCE = [504, 3575, 282, 4649, 314]  # The capital of France is
ASKS: list[Ask] = [
    (COUNT, GenerationConfig(max_new_tokens=12)),
    (FRANCE, GenerationConfig(max_new_tokens=12, temperature=1.0, seed=42, ignore_eos=True)),
    ([*COUNT, 216, 38, 28, *FRANCE], GenerationConfig(max_new_tokens=10)),
]


@pytest.fixture(scope="module")
def make_core(demo_checkpoint: Path) -> MakeCore:
    return functools.partial(core_over, str(demo_checkpoint))


@pytest.fixture(scope="module")
def alone(make_core: MakeCore) -> list[Answer]:
    return same_answer.alone(make_core, ASKS)


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_b015_b046_same_answer(make_core: MakeCore, alone: list[Answer], name: str) -> None:
    same_answer.assert_same(same_answer.run(make_core, ASKS, CIRCUMSTANCES[name]), alone, 1e-4)


@pytest.mark.parametrize("ask", ASKS[:2], ids=["greedy", "seeded"])
def test_same_shapes_agree_more_closely(make_core: MakeCore, ask: Ask) -> None:
    same_answer.assert_same_shapes_agree(make_core, [ask])

"""The same request gives the same answer, whatever happens around it: SmolLM2 in float32."""

import dataclasses
import functools
from pathlib import Path

import pytest

from swiftjax.config import SchedulerConfig
from swiftjax.engine.choices import derive_seed
from swiftjax.engine.request import GenerationConfig
from tests import same_answer
from tests.demo import core_over
from tests.fakes import make_request
from tests.same_answer import BUDGET, CIRCUMSTANCES, MAX_SEQS, Answer, Ask, MakeCore

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
def test_p17_b015_b046_same_answer(make_core: MakeCore, alone: list[Answer], name: str) -> None:
    same_answer.assert_same(same_answer.run(make_core, ASKS, CIRCUMSTANCES[name]), alone, 1e-4)


@pytest.mark.parametrize("ask", ASKS[:2], ids=["greedy", "seeded"])
def test_same_shapes_agree_more_closely(make_core: MakeCore, ask: Ask) -> None:
    same_answer.assert_same_shapes_agree(make_core, [ask])


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
def test_b015_choices_are_what_separate_requests_would_be(
    make_core: MakeCore, overlaps: bool
) -> None:
    """Forked from one prompt, whose last page is partly filled: as if each had come alone."""
    prompt, config = ASKS[2][0], GenerationConfig(max_new_tokens=10, temperature=1.0, seed=42)
    seeds = [derive_seed(42, index) for index in range(3)]
    want = same_answer.alone(
        make_core, [(prompt, dataclasses.replace(config, seed=seed)) for seed in seeds]
    )
    core = make_core(
        SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=BUDGET, prefix_cache=False),
        same_answer.RECOMPUTE,
        overlaps,
    )
    core.submit(make_request(core, prompt, dataclasses.replace(config, n=3)))
    got: list[Answer] = [([], []) for _ in seeds]
    while core.has_work:
        for output in core.step():
            got[output.index][0].extend(output.token_ids)
            got[output.index][1].extend(output.logprobs)
    same_answer.assert_same(got, want, 1e-4)

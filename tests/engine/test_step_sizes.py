"""Prompts are cut where the step is padded to a compiled size anyway."""

from hypothesis import given
from hypothesis import strategies as st

from swiftjax.engine.plan import FIXED_COST, PlanDraft
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.sequence import Sequence
from tests.fakes import make_fake_core, make_request

SIZES = (512, 768, 1024, 2048, 8192)
_core = make_fake_core()


def _draft(num_planned: int) -> PlanDraft:
    """A step that holds so many tokens of somebody else."""
    draft = PlanDraft(SIZES[-1], step_sizes=SIZES)
    if num_planned:
        draft.add(Sequence(make_request(_core, [1]), 0), num_planned, samples=True)
    return draft


def _padded(num_tokens: int) -> int:
    return min(size for size in SIZES if size >= num_tokens)


@given(st.integers(0, 300), st.integers(2, 20_000))
def test_a_cut_ends_at_a_step_size_and_never_costs_more(num_planned: int, wanted: int) -> None:
    draft = _draft(num_planned)
    taken = draft.worth_computing(wanted)
    fitting = min(wanted, draft.budget)
    assert taken >= 1
    if taken == wanted:
        return
    total, rest = num_planned + taken, fitting - taken
    assert total in SIZES and rest > 0
    alone = 0 if num_planned else FIXED_COST + _padded(rest) - rest
    assert total + rest + alone < _padded(num_planned + fitting)


def test_beside_decodes_every_step_is_full() -> None:
    assert _draft(255).worth_computing(600) == 768 - 255  # 855 would be padded to 1024
    assert _draft(255).worth_computing(100) == 100  # below the smallest size
    assert _draft(255).worth_computing(20_000) == 20_000  # the budget cuts it


def test_a_lone_prompt_is_cut_only_where_a_step_of_its_own_is_cheaper_than_padding() -> None:
    assert _draft(0).worth_computing(2_100) == 2_048  # then 512, not 8,192
    assert _draft(0).worth_computing(520) == 520  # a second step costs more than 768 do
    assert _draft(0).worth_computing(1_024) == 1_024


def test_the_scheduler_fills_steps_only_where_nobody_follows() -> None:
    """Of two prompts of 5 tokens the second ends a step of 8; a third would fill one of 16."""
    core = make_fake_core(max_num_seqs=4, max_num_batched_tokens=16, step_sizes=(4, 8, 16))
    config = GenerationConfig(max_new_tokens=2)
    for first in (1, 20):
        core.submit(make_request(core, [first, 2, 3, 4, 5], config))
    plan = core.scheduler.schedule(0.0)
    assert [work.num_new for work in plan.work] == [5, 3]
    core.submit(make_request(core, [40] * 30, config))
    core.submit(make_request(core, [50] * 30, config))
    assert [work.num_new for work in core.scheduler.schedule(0.0).work] == [
        1,
        2,
        13,
    ]  # 1 decode, the rest, a chunk

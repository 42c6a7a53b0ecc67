"""With `group_prompts`, prompts are computed in groups that fill steps; answers are the same."""

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftjax.config import EngineConfig, SchedulerConfig
from swiftjax.engine.core import EngineCore
from swiftjax.engine.plan import Plan, PlanDraft
from swiftjax.engine.prompt_groups import MOST_HELD, PromptGroups
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.sequence import Sequence
from tests.fakes import ContextRunner, FakeRunner, make_fake_core, make_request, run_to_end

VOCAB = 97


class Watched:
    """A core that keeps its plans."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.plans: list[Plan] = []
        core.add_observer(self)

    def submitted(self, request: object) -> None: ...
    def told_to(self, what: object, request_id: str) -> None: ...
    def read(self, plan: Plan | None, outputs: object) -> None: ...

    def planned(self, plan: Plan, now: float) -> None:
        """Keep it."""
        self.plans.append(plan)

    def submit(self, *lengths: int, new: int = 4, first: int = 1) -> None:
        """Prompts that share no pages, each for so many new tokens."""
        for number, length in enumerate(lengths):
            prompt = [(first + 7 * number + 13 * i) % VOCAB for i in range(length)]
            request = make_request(self.core, prompt, GenerationConfig(max_new_tokens=new))
            self.core.submit(request)

    def step(self, count: int = 1) -> list[list[int]]:
        """Tokens of each sequence in each of the next steps."""
        for _ in range(count):
            self.core.step()
        return [[work.num_new for work in plan.work] for plan in self.plans[-count:]]


def grouping(**core: Any) -> Watched:
    return Watched(make_fake_core(group_prompts=True, vocab_size=VOCAB, **core))


@pytest.mark.parametrize("overlaps", [False, True])
def test_decodes_wait_while_prompts_fill_steps(overlaps: bool) -> None:
    core = grouping(overlaps=overlaps)
    core.submit(8, 8, 8, 8)
    assert core.step(3) == [[8, 8], [8, 8], [1, 1, 1, 1]]


def test_without_the_option_they_do_not() -> None:
    core = Watched(make_fake_core())
    core.submit(8, 8, 8, 8)
    assert core.step(3) == [[8, 8], [1, 1, 8, 6], [1, 1, 1, 2]]


def test_a_prompt_in_chunks_is_waited_for_to_its_last_full_step() -> None:
    core = grouping()
    core.submit(4, 50)
    assert core.step(5) == [[4, 12], [16], [16], [1, 6], [1, 1]]


def test_decodes_do_not_wait_for_ever() -> None:
    """Prompts that end with their first token free their rows for more of them."""
    core = grouping()
    core.submit(4, new=3 * MOST_HELD)
    core.step()
    for first in range(2 * MOST_HELD + 2):
        core.submit(16, new=1, first=first)
        core.step()
    had_turns = [1 in [work.num_new for work in plan.work] for plan in core.plans]
    waits = [len(list(steps)) for had_turn, steps in groupby(had_turns) if not had_turn]
    assert max(waits) == MOST_HELD


class _Waiting:
    """Three newcomers without a token."""

    def __len__(self) -> int:
        return 3

    def oldest_ones(self, count: int) -> list[Sequence]:
        """None that would fill a step."""
        return []


def test_newcomers_that_may_start_do_not_wait_again_until_one_has() -> None:
    """There may be no pages for them yet."""
    table: Any = SimpleNamespace(waiting=_Waiting())
    pages: Any = None
    groups = PromptGroups(SchedulerConfig(max_num_seqs=4, group_prompts=True), table, pages)
    draft: Any = SimpleNamespace(work=[1], budget=16)
    assert [groups.newcomers_wait(draft, 1) for _ in range(6)] == [True] * 3 + [False] * 3
    groups.newcomer_started()
    assert groups.newcomers_wait(draft, 1)


def test_decodes_go_first_where_prompts_leave_room() -> None:
    core = grouping()
    core.submit(8, 8, 8)
    assert core.step(2) == [[8, 8], [1, 1, 8]]


def test_decodes_go_on_where_somebody_waits_for_their_rows() -> None:
    core = grouping(max_num_seqs=3)
    core.submit(16, 16, 16, 16)
    assert core.step(2) == [[16], [1, 15]]


def test_decodes_go_on_where_pages_are_few() -> None:
    """Twelve pages of 4: after two prompts of 8 there are 8, a full step may want 4 + 4, then 4."""
    core = grouping(num_pages=12, max_model_len=24)
    core.submit(8, 8, new=8)
    core.step()
    core.submit(8, 8, new=8, first=40)
    assert core.step(1) == [[8, 8]]
    core = grouping(num_pages=11, max_model_len=24)
    core.submit(8, 8, new=8)
    core.step()
    core.submit(8, 8, new=8, first=40)
    assert core.step(1) == [[1, 1, 8, 6]]


def test_what_cached_prefixes_leave_of_a_step_is_for_the_decodes() -> None:
    core = grouping(max_num_seqs=5)
    core.submit(12, new=1)
    core.step(2)
    core.submit(16, new=8, first=50)
    core.step()
    core.submit(12, new=8)
    core.submit(12, new=8)
    assert core.step() == [[4, 4, 1]]


def test_decodes_do_not_wait_for_newcomers_behind_the_gate() -> None:
    core = grouping(max_num_seqs=6, min_batch_size=3, max_wait=2.0, clock=lambda: 0.0)
    core.submit(2, 2, 2)
    core.step()
    core.submit(16)
    assert core.step() == [[1, 1, 1]]


def test_newcomers_wait_for_company_but_no_longer_than_a_step_of_idle_rows() -> None:
    core = grouping(max_num_seqs=4)
    core.submit(2, 2, 2, new=12)
    core.submit(2, new=2, first=30)
    core.submit(3, 3, first=60)
    assert core.step(2) == [[2, 2, 2, 2], [1, 1, 1, 1]]
    # Two wait for the row that is idle now: after three steps, a fourth would make four rows.
    assert core.step(4) == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1, 3]]


def test_newcomers_that_fill_the_step_or_all_have_rows_start_at_once() -> None:
    for lengths, want in (((14, 2), [1, 1, 1, 13]), ((3,), [1, 1, 1, 3])):
        core = grouping(max_num_seqs=4)
        core.submit(2, 2, 2, new=12)
        core.submit(2, new=2, first=30)
        core.step(2)
        core.submit(*lengths, first=60)
        assert core.step() == [want]


def test_nobody_gives_way_to_who_joined_in_the_same_plan() -> None:
    core = make_fake_core(num_pages=4, max_model_len=16)
    for prompt in ([1] * 4, [2] * 4):
        core.submit(make_request(core, prompt, GenerationConfig(max_new_tokens=8)))
    core.step()
    scheduler = core.scheduler
    old, new = scheduler.sequences.running.values()
    draft = PlanDraft(16)
    draft.admitted.append(new)
    assert not scheduler.preemption.take_pages(draft, old, 4)
    assert scheduler.num_preemptions == 0 and scheduler.preemption.is_due


def test_it_is_off_unless_asked_for() -> None:
    assert not SchedulerConfig().group_prompts and not EngineConfig(model_path="").group_prompts


LOADS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 14), st.integers(0, 30)), min_size=1, max_size=14
)


@settings(max_examples=60)
@given(
    load=LOADS,
    rows=st.integers(1, 5),
    budget=st.sampled_from([5, 16, 40]),
    num_pages=st.sampled_from([12, 40]),
    overlaps=st.booleans(),
)
def test_no_plan_is_empty_and_answers_are_those_without_it(
    load: list[tuple[int, int, int]], rows: int, budget: int, num_pages: int, overlaps: bool
) -> None:
    """Requests of (prompt length, new tokens, steps after it was submitted)."""

    def answer(group_prompts: bool) -> list[list[int]]:
        runner = ContextRunner(VOCAB, num_pages, 4)
        core = make_fake_core(
            group_prompts=group_prompts, vocab_size=VOCAB, num_pages=num_pages, runner=runner,
            max_num_seqs=rows, max_num_batched_tokens=max(budget, rows), max_model_len=44,
            overlaps=overlaps,
        )  # fmt: skip
        tokens: dict[str, list[int]] = {}
        for number, (length, new, delay) in enumerate(load):
            prompt = [(number % 3 + 5 * i) % VOCAB for i in range(length)]
            config = GenerationConfig(max_new_tokens=new)
            core.submit(make_request(core, prompt, config, request_id=str(number)))
            for _ in range(delay if core.has_work else 0):
                step(core, runner, tokens, overlaps=overlaps)
        while core.has_work:
            step(core, runner, tokens, overlaps=overlaps)
        return [tokens[str(number)] for number in range(len(load))]

    assert answer(True) == answer(False)


def step(
    core: EngineCore, runner: FakeRunner, tokens: dict[str, list[int]], *, overlaps: bool
) -> None:
    """Of the plain loop each one computes something while there is work."""
    before, had_work = len(runner.batches), core.has_work
    for output in core.step():
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    core.scheduler.check_integrity()
    assert overlaps or len(runner.batches) == before + had_work


def test_choices_fork_in_groups_too() -> None:
    def answer(group_prompts: bool) -> dict[str, list[int]]:
        runner = ContextRunner(VOCAB, 64, 4)
        core = make_fake_core(
            group_prompts=group_prompts, vocab_size=VOCAB, runner=runner, max_num_seqs=5,
            overlaps=True,
        )  # fmt: skip
        for first in range(6):
            config = GenerationConfig(max_new_tokens=5, n=3)
            prompt = [first, *range(10, 30)]
            core.submit(make_request(core, prompt, config, request_id=str(first)))
        return {name: sorted(tokens) for name, tokens in run_to_end(core).items()}

    grouped = answer(True)
    assert grouped == answer(False)
    assert len(grouped) == 6 and all(len(tokens) == 15 for tokens in grouped.values())

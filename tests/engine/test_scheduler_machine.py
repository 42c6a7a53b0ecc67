"""The state machine over a fake model that reads every context back through the page table."""

from hypothesis import settings
from hypothesis import strategies as st

from swiftjax.config import SchedulerConfig
from swiftjax.engine.choices import derive_seed
from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from tests.engine.engine_machine import EngineMachine
from tests.fakes import (
    ContextRunner,
    LossyRunner,
    context_oracle,
    make_fake_core,
    make_request,
    run_to_end,
)

VOCAB, PAGES, PAGE = 97, 12, 4
# A quarter of the sequences are cheaper to move than to compute again, and the host has few pages.
COSTS = PreemptionCosts(host_pages=8, seconds_per_page=1.0, seconds_per_token=0.55)
BASES = ([3] * 9, [5, 6, 7, 8] * 4, list(range(20)))


class FakeMachine(EngineMachine):
    """Twelve pages for prompts of up to 43 tokens and answers of up to 18."""

    def make_core(self, config: SchedulerConfig, *, overlaps: bool) -> EngineCore:
        self.runner = ContextRunner(VOCAB, PAGES, PAGE)
        return make_fake_core(
            vocab_size=VOCAB, num_pages=PAGES, page_size=PAGE, max_model_len=44,
            max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.policy, prefix_cache=config.prefix_cache,
            group_prompts=config.group_prompts, costs=COSTS, runner=self.runner, clock=self.clock,
            overlaps=overlaps,
        )  # fmt: skip

    def draw_prompt(self, data: st.DataObject) -> list[int]:
        tail = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
        keep = data.draw(st.integers(0, 40))
        if self.prompts and data.draw(st.booleans()):  # a second turn
            key = data.draw(st.sampled_from(list(self.prompts)))
            return [*self.prompts[key], *self.oracle[key]][: min(keep, 37)] + tail
        return data.draw(st.sampled_from(BASES))[: keep // 2] + tail

    def answer(self, prompt: list[int], count: int, index: int) -> list[int]:
        return context_oracle(prompt, count, VOCAB, derive_seed(0, index))

    def teardown(self) -> None:
        super().teardown()
        assert not hasattr(self, "core") or not self.runner.host


TestFakeMachine = FakeMachine.TestCase
TestFakeMachine.settings = settings(max_examples=70, stateful_step_count=40)


def test_the_machine_ran_thousands_of_steps() -> None:
    """It stands after the machine in this file, which has run unless it was deselected."""
    assert FakeMachine.num_steps > 2000 or FakeMachine.num_steps == 0


def test_the_machine_meets_both_preemptions_shared_prefixes_and_forks() -> None:
    """The settings above really lead to what the machine is there to check."""
    runner = ContextRunner(VOCAB, PAGES, PAGE)
    core = make_fake_core(
        vocab_size=VOCAB, num_pages=PAGES, page_size=PAGE, max_model_len=44, max_num_seqs=3,
        max_num_batched_tokens=40, costs=COSTS, runner=runner,
    )  # fmt: skip
    swaps = recomputes = cached = 0
    for i in range(60):
        prompt = [*BASES[i % 3][: 8 + i % 9], i]
        config = GenerationConfig(max_new_tokens=10 + i % 8, n=1 + i % 2)
        core.submit(make_request(core, prompt, config))
    while core.has_work:
        before = core.scheduler.num_preemptions, len(runner.swapped)
        core.step()
        swapped = max(0, len(runner.swapped) - before[1])
        swaps += swapped
        recomputes += core.scheduler.num_preemptions - before[0] - swapped
        cached += sum((s.num_cached or 0) > 0 for s in core.scheduler.sequences.running.values())
    assert swaps > 3 and recomputes > 3 and cached > 20 and runner.num_copies > 10


def test_swapped_pages_that_are_lost_are_computed_again() -> None:
    runner = LossyRunner(VOCAB, PAGES, PAGE)
    core = make_fake_core(
        vocab_size=VOCAB, num_pages=PAGES, page_size=PAGE, max_model_len=44, max_num_seqs=3,
        max_num_batched_tokens=40, costs=COSTS, runner=runner,
    )  # fmt: skip
    want = {}
    for i in range(40):
        prompt = [*BASES[i % 3][: 8 + i % 9], i]
        request = make_request(core, prompt, GenerationConfig(max_new_tokens=10 + i % 8))
        want[request.request_id] = context_oracle(prompt, request.max_new_tokens, VOCAB)
        core.submit(request)
    assert run_to_end(core) == want
    assert runner.num_fetched > 6

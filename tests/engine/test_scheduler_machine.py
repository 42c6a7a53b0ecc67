"""Submit, step, abort, deadlines, preemption by swap and recompute, shared prefixes, in any order.

The runner reads every context back through the page table, so an answer is right only if every
page of it was.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swiftjax.engine.policies import QUEUE_POLICIES
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from tests.fakes import ContextRunner, greedy_oracle, make_fake_core, make_request

VOCAB, PAGES, PAGE = 97, 12, 4
# A quarter of the sequences are cheaper to move than to compute again, and the host has few pages.
COSTS = PreemptionCosts(host_pages=8, seconds_per_page=1.0, seconds_per_token=0.55)
BASES = ([3] * 9, [5, 6, 7, 8] * 4, list(range(20)))


class EngineMachine(RuleBasedStateMachine):
    """Nothing is lost, leaked or changed."""

    @initialize(
        policy=st.sampled_from(sorted(QUEUE_POLICIES)),
        prefix_cache=st.booleans(),
        budget=st.sampled_from([3, 7, 40]),
    )
    def build(self, policy: str, prefix_cache: bool, budget: int) -> None:
        self.now = 0.0
        self.runner = ContextRunner(VOCAB, PAGES, PAGE)
        self.core = make_fake_core(
            vocab_size=VOCAB, num_pages=PAGES, page_size=PAGE, max_model_len=44, max_num_seqs=3,
            max_num_batched_tokens=budget, policy=policy, prefix_cache=prefix_cache, costs=COSTS,
            runner=self.runner, clock=lambda: self.now,
        )  # fmt: skip
        self.oracle: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    @rule(
        base=st.sampled_from(BASES),
        keep=st.integers(0, 20),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        new=st.integers(1, 18),
        patience=st.none() | st.integers(1, 40),
        who=st.sampled_from("ab"),
    )
    def submit(
        self, base: list[int], keep: int, tail: list[int], new: int, patience: int | None, who: str
    ) -> None:
        prompt = base[:keep] + tail
        deadline = None if patience is None else self.now + patience
        config = GenerationConfig(max_new_tokens=new)
        request = make_request(
            self.core, prompt, config, deadline=deadline, client_id=who, priority=len(tail)
        )
        self.core.submit(request)
        self.oracle[request.request_id] = greedy_oracle(prompt, request.max_new_tokens, VOCAB)
        self.tokens[request.request_id] = []

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 1.0
            for output in self.core.step():
                assert output.request_id not in self.ended, "told about after its end"
                self.tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    self.ended[output.request_id] = output.finish_reason

    @precondition(lambda self: self.oracle)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.core.abort(data.draw(st.sampled_from(sorted(self.oracle))))

    @rule()
    def flush_prefix_cache(self) -> None:
        self.core.scheduler.pool.forget_published()

    @invariant()
    def nothing_leaks(self) -> None:
        self.core.scheduler.check_integrity()

    @invariant()
    def every_stream_is_a_prefix(self) -> None:
        for request_id, tokens in self.tokens.items():
            assert tokens == self.oracle[request_id][: len(tokens)]
            if self.ended.get(request_id) == "length":
                assert tokens == self.oracle[request_id]

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(2000):
            if not self.core.has_work:
                break
            self.step(1)
        assert set(self.ended) == set(self.oracle), "a request never ended"
        assert self.core.stats().num_free_pages == PAGES
        self.nothing_leaks()
        self.every_stream_is_a_prefix()
        # Host copies of aborted sequences are dropped with the next step that computes something.
        self.core.submit(make_request(self.core, [1], GenerationConfig(max_new_tokens=1)))
        self.core.step()
        assert not self.runner.host


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=40)


def test_the_machine_meets_both_preemptions_and_shared_prefixes() -> None:
    """The settings above really lead to what the machine is there to check."""
    runner = ContextRunner(VOCAB, PAGES, PAGE)
    core = make_fake_core(
        vocab_size=VOCAB, num_pages=PAGES, page_size=PAGE, max_model_len=44, max_num_seqs=3,
        max_num_batched_tokens=40, costs=COSTS, runner=runner,
    )  # fmt: skip
    swaps = recomputes = cached = 0
    for i in range(60):
        prompt = [*BASES[i % 3][: 8 + i % 9], i]
        core.submit(make_request(core, prompt, GenerationConfig(max_new_tokens=10 + i % 8)))
    while core.has_work:
        before = core.scheduler.num_preemptions, len(runner.swapped)
        core.step()
        swapped = max(0, len(runner.swapped) - before[1])
        swaps += swapped
        recomputes += core.scheduler.num_preemptions - before[0] - swapped
        cached += sum(s.num_cached > 0 for s in core.scheduler._running.values())
    assert swaps > 3 and recomputes > 3 and cached > 20

"""A hypothesis state machine over an engine core: anything a client may do, in any order.

Invariants: every page is owned by exactly its reference count, free and used pages add up, every
accepted request ends exactly once, and every stream is a prefix of the greedy oracle. What model
computes is up to the subclass.
"""

from abc import abstractmethod

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swiftjax.config import SchedulerConfig
from swiftjax.engine.core import EngineCore
from swiftjax.engine.policies import QUEUE_POLICIES
from swiftjax.engine.request import GenerationConfig
from tests.fakes import make_request

ROWS = 3
Key = tuple[str, int]  # a request id and the index of a choice


class EngineMachine(RuleBasedStateMachine):
    """Nothing is lost, leaked or changed."""

    max_new_tokens = 18
    num_steps = 0  # of all examples of a class

    @abstractmethod
    def make_core(self, config: SchedulerConfig, *, overlaps: bool) -> EngineCore:
        """An idle core over `self.clock`, short of pages and rows."""

    @abstractmethod
    def draw_prompt(self, data: st.DataObject) -> list[int]:
        """A prompt; prompts should share prefixes often."""

    @abstractmethod
    def answer(self, prompt: list[int], count: int, index: int) -> list[int]:
        """What an undisturbed engine answers, greedily, as this choice of a request."""

    def clock(self) -> float:
        """Moves with steps and when a rule says so."""
        return self.now

    @initialize(
        policy=st.sampled_from(sorted(QUEUE_POLICIES)),
        prefix_cache=st.booleans(),
        budget=st.sampled_from([3, 7, 40]),
        overlaps=st.booleans(),
        groups=st.booleans(),
    )
    def build(
        self, policy: str, prefix_cache: bool, budget: int, overlaps: bool, groups: bool
    ) -> None:
        self.now = 0.0
        config = SchedulerConfig(
            max_num_seqs=ROWS,
            max_num_batched_tokens=budget,
            policy=policy,
            prefix_cache=prefix_cache,
            group_prompts=groups,
        )
        self.core = self.make_core(config, overlaps=overlaps)
        self.prompts: dict[Key, list[int]] = {}
        self.oracle: dict[Key, list[int]] = {}
        self.tokens: dict[Key, list[int]] = {}
        self.ended: dict[Key, str] = {}

    @rule(
        data=st.data(),
        new=st.integers(1, 18),
        n=st.sampled_from([1, 1, 2, 4]),
        patience=st.none() | st.integers(1, 40),
        who=st.sampled_from("ab"),
    )
    def submit(self, data: st.DataObject, new: int, n: int, patience: int | None, who: str) -> None:
        prompt = self.draw_prompt(data)
        request = make_request(
            self.core,
            prompt,
            GenerationConfig(max_new_tokens=min(new, self.max_new_tokens), n=n),
            deadline=None if patience is None else self.now + patience,
            client_id=who,
            priority=len(prompt) % 3,
        )
        self.core.submit(request)
        for index in range(n):
            key = (request.request_id, index)
            self.prompts[key], self.tokens[key] = prompt, []
            self.oracle[key] = self.answer(prompt, request.max_new_tokens, index)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.now += 1.0
            type(self).num_steps += 1
            for output in self.core.step():
                key = (output.request_id, output.index)
                assert key not in self.ended, "told about after its end"
                self.tokens[key] += output.token_ids
                if output.finish_reason is not None:
                    self.ended[key] = output.finish_reason

    @precondition(lambda self: self.oracle)
    @rule(data=st.data(), whole=st.booleans())
    def cancel(self, data: st.DataObject, whole: bool) -> None:
        request_id, index = data.draw(st.sampled_from(list(self.oracle)))
        self.core.abort(request_id, None if whole else index)

    @precondition(lambda self: self.oracle)
    @rule(data=st.data(), count=st.integers(1, 5))
    def pause(self, data: st.DataObject, count: int) -> None:
        """And resume after some steps, unless it has ended."""
        request_id, _ = data.draw(st.sampled_from(list(self.oracle)))
        self.core.pause(request_id)
        self.step(count)
        self.core.resume(request_id)

    @rule(seconds=st.integers(1, 20))
    def deadlines_pass(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def preempt(self) -> None:
        self.core.scheduler.preemption.preempt_next()
        self.step(1)

    @rule()
    def flush_prefix_cache(self) -> None:
        self.core.scheduler.pool.forget_published()

    @rule()
    def drain(self) -> None:
        """Everything that was taken ends, and the pool is as it was."""
        for _ in range(2000):
            if not self.core.has_work:
                break
            self.step(1)
        assert set(self.ended) == set(self.oracle), "a request never ended"
        assert self.core.stats().num_free_pages == self.core.stats().num_pages

    @invariant()
    def nothing_leaks(self) -> None:
        self.core.scheduler.check_integrity()

    @invariant()
    def every_stream_is_a_prefix(self) -> None:
        for key, tokens in self.tokens.items():
            assert tokens == self.oracle[key][: len(tokens)]
            if self.ended.get(key) == "length":
                assert tokens == self.oracle[key]

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.drain()
        self.nothing_leaks()
        self.every_stream_is_a_prefix()
        # Host copies of aborted sequences are dropped with the next step that computes something.
        self.core.submit(make_request(self.core, [1], GenerationConfig(max_new_tokens=1)))
        self.core.step()

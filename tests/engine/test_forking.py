"""Choices fork from the pages of one prompt: what they share, what they copy, who inherits.

The runner reads every context back through the page table, so an answer is right only if every
page of it was.
"""

from typing import Any

import pytest

from swiftjax.engine.choices import derive_seed
from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.sequence import Sequence
from tests.fakes import ContextRunner, context_oracle, make_fake_core, make_request, run_to_end

VOCAB, PAGE = 97, 4
BOTH_LOOPS = pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
SWAP = PreemptionCosts(host_pages=64, seconds_per_token=1.0)


TWENTY = GenerationConfig(max_new_tokens=20)


class Run:
    """One core, one request with several choices, and what was said of each."""

    def __init__(self, prompt_len: int, n: int, new: int, *, pages: int = 64, **core: Any) -> None:
        self.runner = ContextRunner(VOCAB, pages, PAGE)
        settings = {"max_num_batched_tokens": 64, "prefix_cache": False} | core
        self.core: EngineCore = make_fake_core(
            vocab_size=VOCAB, num_pages=pages, page_size=PAGE, runner=self.runner, **settings
        )
        self.prompt = [(i * i + 3) % VOCAB for i in range(prompt_len)]
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.reasons: list[str | None] = [None] * n
        config = GenerationConfig(max_new_tokens=new, n=n)
        self.core.submit(make_request(self.core, self.prompt, config, request_id="a"))

    def step(self) -> None:
        for output in self.core.step():
            if output.request_id == "a":
                self.tokens[output.index] += output.token_ids
                self.reasons[output.index] = output.finish_reason or self.reasons[output.index]
        self.core.scheduler.check_integrity()

    def finish(self) -> None:
        while self.core.has_work:
            self.step()
        assert self.core.stats().num_free_pages == self.core.stats().num_pages

    @property
    def used(self) -> int:
        return self.core.stats().num_pages - self.core.stats().num_free_pages

    @property
    def num_computed(self) -> int:
        """Tokens the runner was given since the start."""
        size = self.runner.cache.size
        return sum(int((batch.slot_mapping < size).sum()) for batch in self.runner.batches)

    def assert_right(self, *, ended: dict[int, str] | None = None) -> None:
        """Every choice is what its seed gives alone, those ended early the beginning of it."""
        for index, (tokens, reason) in enumerate(zip(self.tokens, self.reasons, strict=True)):
            want = context_oracle(self.prompt, len(tokens), VOCAB, derive_seed(0, index))
            assert tokens == want, f"choice {index}"
            assert reason == (ended or {}).get(index, "length")


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_pages_and_tokens_are_exactly_the_shared_and_the_own(
    prompt_len: int, n: int, prefix_cache: bool
) -> None:
    """p - 1 pages are shared, every choice has a last one of its own; the prompt runs once."""
    run = Run(prompt_len, n, 9, prefix_cache=prefix_cache)
    shared = -(-prompt_len // PAGE) - 1
    run.step()
    assert run.used == shared + 1 and run.num_computed == prompt_len
    for k in range(1, 9):  # choice 0 has k + 1 tokens now, the forks have k
        run.step()
        leader = -(-(prompt_len + k) // PAGE)
        fork = -(-(prompt_len + k - 1) // PAGE)
        assert run.used == shared + (leader - shared) * (k < 8) + (n - 1) * (fork - shared)
    run.finish()
    run.assert_right()
    assert run.num_computed == prompt_len + (n - 1) + n * 8


@BOTH_LOOPS
def test_the_prompt_runs_once_even_if_the_first_choice_ends_with_it(overlaps: bool) -> None:
    run = Run(14, 4, 1, overlaps=overlaps)
    run.finish()
    run.assert_right()
    assert run.num_computed == 14 + 3


@BOTH_LOOPS
def test_a_full_last_page_is_left_alone_by_the_heir(overlaps: bool) -> None:
    """Others may read it through the prefix cache, so its four tokens are computed again.

    In the overlapped loop the fork starts before the first choice is known to have ended.
    """
    run = Run(16, 2, 1, overlaps=overlaps)
    run.finish()
    run.assert_right()
    assert run.num_computed == 16 + (1 if overlaps else 4)


@BOTH_LOOPS
def test_an_heir_does_not_write_to_what_the_prefix_cache_shows(overlaps: bool) -> None:
    """The page of the last prompt token is full of the first choice's answer by then."""
    run = Run(14, 2, 5, max_num_seqs=1, prefix_cache=True, overlaps=overlaps)
    run.finish()
    run.assert_right()
    second_turn = [*run.prompt, *run.tokens[0][:2], 1]
    run.core.submit(make_request(run.core, second_turn, request_id="b"))
    assert run_to_end(run.core)["b"] == context_oracle(second_turn, 4, VOCAB)


@BOTH_LOOPS
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
@pytest.mark.parametrize("pages", [7, 9, 16])
def test_forks_wait_for_rows_and_pages(max_num_seqs: int, pages: int, overlaps: bool) -> None:
    run = Run(13, 4, 12, pages=pages, max_num_seqs=max_num_seqs, overlaps=overlaps)
    other = make_request(run.core, [5, 6], GenerationConfig(max_new_tokens=3), request_id="b")
    run.core.submit(other)
    run.finish()
    run.assert_right()


@BOTH_LOOPS
@pytest.mark.parametrize("costs", [None, SWAP], ids=["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("pages", [9, 12, 30])
def test_preempted_parents_and_forks_give_the_same(
    costs: PreemptionCosts | None, prefix_cache: bool, pages: int, overlaps: bool
) -> None:
    run = Run(
        13, 4, 14, pages=pages, costs=costs, prefix_cache=prefix_cache, max_num_batched_tokens=6,
        overlaps=overlaps,
    )  # fmt: skip
    other = GenerationConfig(max_new_tokens=20)
    run.core.submit(make_request(run.core, [5, 6], other, request_id="b"))
    steps = 0
    while run.core.has_work:
        steps += 1
        if steps % 3 == 0:
            run.core.scheduler.preemption.preempt_next()
        run.step()
    run.assert_right()
    assert run.core.scheduler.num_preemptions > 3


def preempt_first_choice(run: Run) -> Sequence:
    """Let it run beside another request, then preempt it right before its siblings could fork."""
    run.core.submit(make_request(run.core, [9], request_id="b"))
    run.step()
    run.step()
    leader = run.core.scheduler.sequences.by_id["a/0"]
    assert leader.num_uncomputed == 1
    run.core.scheduler.preemption.choose_victim = lambda running: leader
    run.core.scheduler.preemption.preempt_next()
    run.step()
    return leader


@pytest.mark.parametrize("costs", [None, SWAP], ids=["recompute", "swap"])
def test_forks_wait_until_a_preempted_parent_is_back(costs: PreemptionCosts | None) -> None:
    run = Run(13, 3, 5, max_num_batched_tokens=8, costs=costs)
    leader = preempt_first_choice(run)
    assert leader.state == ("swapped" if costs else "preempted")
    assert run.core.scheduler.sequences.forks.num_forking == 2
    run.finish()
    run.assert_right()


@BOTH_LOOPS
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("index", [0, 1, 3, None])
@pytest.mark.parametrize("max_num_seqs", [2, 4])
def test_any_choice_may_be_aborted_at_any_time(
    steps: int, index: int | None, max_num_seqs: int, overlaps: bool
) -> None:
    run = Run(13, 4, 6, max_num_seqs=max_num_seqs, max_num_batched_tokens=6, overlaps=overlaps)
    for _ in range(steps):
        run.step()
    run.core.abort("a", index)
    run.finish()
    ended = range(4) if index is None else [index]
    run.assert_right(ended=dict.fromkeys(ended, "abort"))
    # Whoever takes over has the tokens that were computed, so nothing runs twice.
    assert run.num_computed <= 13 + 3 + 4 * 5


def test_the_heir_of_a_swapped_choice_starts_anew() -> None:
    run = Run(13, 2, 6, max_num_batched_tokens=8, costs=SWAP)
    assert preempt_first_choice(run).state == "swapped"
    run.core.abort("a", 0)
    run.finish()
    run.assert_right(ended={0: "abort"})
    assert not run.runner.host


def test_a_page_that_this_very_step_fills_is_not_copied() -> None:
    """A source that comes back with another's pages, which are written in the same step, waits."""
    run = Run(14, 2, 30, max_num_seqs=3, prefix_cache=True)
    run.core.abort("a")
    run.step()
    other = [*run.prompt, *context_oracle(run.prompt, 2, VOCAB), 1]
    run.core.submit(make_request(run.core, other, request_id="x", config=TWENTY))
    run.core.submit(make_request(run.core, [9], request_id="y", config=TWENTY))
    config = GenerationConfig(max_new_tokens=30, n=2)
    run.tokens, run.reasons = [[], []], [None, None]
    run.core.submit(make_request(run.core, run.prompt, config, request_id="a"))
    scheduler = run.core.scheduler
    for _ in range(5):
        run.step()
    for name in ("x", "a/0"):
        scheduler.preemption.choose_victim = lambda running, name=name: scheduler.sequences.by_id[
            name
        ]
        scheduler.preemption.preempt_next()
        run.step()
    run.core.abort("y")
    scheduler.pool.forget_published()
    run.step()  # x and a/0 are back and share x's pages; the fork may start a step later
    assert (
        scheduler.sequences.by_id["a/0"].page_ids[:4] == scheduler.sequences.by_id["x"].page_ids[:4]
    )
    run.finish()
    run.assert_right()

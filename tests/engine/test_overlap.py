"""The overlapped loop gives what the plain one gives, token for token, and leaks nothing."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.sequence import Sequence
from tests.fakes import ContextRunner, context_hash, make_fake_core, make_request

VOCAB, PAGE = 50, 4
SWAP = PreemptionCosts(host_pages=8, seconds_per_page=1e-9, seconds_per_token=1.0)


def _core(*, overlaps: bool, num_pages: int = 12, swap: bool = False) -> EngineCore:
    return make_fake_core(
        vocab_size=VOCAB, num_pages=num_pages, page_size=PAGE, max_model_len=40, max_num_seqs=3,
        max_num_batched_tokens=8, runner=ContextRunner(VOCAB, num_pages, PAGE),
        costs=SWAP if swap else None, overlaps=overlaps,
    )  # fmt: skip


def _oracle(prompt: list[int], count: int, stops: set[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(context_hash(tokens, VOCAB))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), min_size=1, max_size=12),  # prompt
        st.integers(1, 14),  # max_new_tokens
        st.sets(st.integers(0, VOCAB - 1), max_size=6),  # late stops
        st.integers(0, 12),  # step of arrival
        st.one_of(st.none(), st.integers(0, 30)),  # step of an abort
        st.booleans(),  # rules that need every token read
    ),
    min_size=1,
    max_size=7,
)


def _run(core: EngineCore, requests: list[Any], preempt_every: int) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(len(requests))}
    ended: dict[str, str] = {}
    for step in range(400):
        for i, (prompt, count, stops, arrival, abort, ruled) in enumerate(requests):
            if arrival == step:
                config = GenerationConfig(
                    max_new_tokens=count,
                    stop_token_ids=tuple(stops),
                    bad_words_ids=((VOCAB - 1, VOCAB - 1, VOCAB - 1),) if ruled else (),
                )
                core.submit(make_request(core, prompt, config, request_id=f"r{i}"))
            if abort == step:
                core.abort(f"r{i}")
        if preempt_every and step % preempt_every == 0:
            core.scheduler.preemption.preempt_next()
        for output in core.step():
            assert output.request_id not in ended, "told something after its end"
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
        core.scheduler.check_integrity()
        if step > 12 and not core.has_work:
            break
    assert not core.has_work and set(ended) == set(tokens)
    pool = core.scheduler.pool
    assert pool.num_free == pool.num_pages
    for i, (prompt, count, stops, *_) in enumerate(requests):
        whole = _oracle(prompt, count, stops)
        got = tokens[f"r{i}"]
        assert got == (whole[: len(got)] if ended[f"r{i}"] == "abort" else whole)
    return {name: got for name, got in tokens.items() if ended[name] != "abort"}


@settings(max_examples=150, deadline=None)
@given(requests=REQUESTS, preempt_every=st.sampled_from([0, 1, 3]), swap=st.booleans())
def test_overlapped_equals_plain(requests: list[Any], preempt_every: int, swap: bool) -> None:
    plain = _run(_core(overlaps=False, swap=swap), requests, preempt_every)
    overlapped = _run(_core(overlaps=True, swap=swap), requests, preempt_every)
    for name in plain.keys() & overlapped.keys():
        assert plain[name] == overlapped[name]


def test_the_next_step_is_dispatched_before_the_last_one_is_read() -> None:
    core = _core(overlaps=True)
    runner: ContextRunner = core._runner  # type: ignore[assignment]
    core.submit(make_request(core, [1, 2, 3], GenerationConfig(max_new_tokens=3)))
    assert core.step() == [] and len(runner.batches) == 1
    assert len(core.step()[0].token_ids) == 1 and len(runner.batches) == 2
    assert len(core.step()[0].token_ids) == 1 and len(runner.batches) == 3
    last = core.step()[0]
    # The length was known beforehand: no step was wasted on a fourth token.
    assert last.finish_reason == "length" and len(runner.batches) == 3
    assert not core.has_work


def test_a_stop_acts_one_step_late_without_leaking_a_token() -> None:
    core = _core(overlaps=True)
    runner: ContextRunner = core._runner  # type: ignore[assignment]
    stop = context_hash([1, 2, 3], VOCAB)
    config = GenerationConfig(max_new_tokens=9, stop_token_ids=(stop,))
    core.submit(make_request(core, [1, 2, 3], config))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert [o.token_ids for o in outputs] == [(stop,)] and outputs[0].finish_reason == "stop"
    assert len(runner.batches) == 2
    core.scheduler.check_integrity()


@pytest.mark.parametrize("swap", [False, True])
def test_nobody_is_preempted_while_a_step_is_in_flight(swap: bool) -> None:
    """Two sequences outgrow the pool; the plan that preempts follows a read."""
    core = _core(overlaps=True, num_pages=5, swap=swap)
    for prompt in ([1, 2, 3], [3, 2, 1]):
        core.submit(make_request(core, prompt, GenerationConfig(max_new_tokens=12)))
    in_flight_then = []
    preempt = core.scheduler.sequences.preempt

    def spy(sequence: Sequence, *, swapped: bool) -> None:
        in_flight_then.append(any(s.num_unread for s in core.scheduler.sequences.running.values()))
        preempt(sequence, swapped=swapped)

    core.scheduler.sequences.preempt = spy  # type: ignore[method-assign]
    while core.has_work:
        core.step()
        core.scheduler.check_integrity()
    assert in_flight_then and not any(in_flight_then)


def test_books_are_checked_while_idle_but_not_all_the_time() -> None:
    now = [0.0]
    core = make_fake_core(clock=lambda: now[0])
    checks = []
    core.scheduler.check_integrity = lambda: checks.append(now[0])  # type: ignore[method-assign]
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
        core.check_while_idle()
    assert checks == [0.0, 60.0]

"""The gate before the queue, and the time until which an engine has nothing to do."""

import math

import pytest

from swiftjax.engine.core import EngineCore
from swiftjax.engine.request import GenerationConfig
from tests.fakes import make_fake_core, make_request, run_to_end


class Clock:
    """A time that tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def gated(clock: Clock, *, min_batch_size: int = 3, **core: int) -> EngineCore:
    return make_fake_core(min_batch_size=min_batch_size, max_wait=2.0, clock=clock, **core)


def test_newcomers_wait_until_there_are_enough() -> None:
    clock = Clock()
    core = gated(clock)
    for waiting in (1, 2):
        core.submit(make_request(core, [1]))
        assert core.step() == [] and core.stats().num_waiting == waiting
    assert core.seconds_to_work() == 2.0
    core.submit(make_request(core, [1]))
    assert core.seconds_to_work() == 0.0
    assert len(core.step()) == 3


def test_newcomers_wait_no_longer_than_the_limit() -> None:
    clock = Clock()
    core = gated(clock)
    core.submit(make_request(core, [1]))
    clock.now = 1.5
    assert core.step() == [] and core.seconds_to_work() == 0.5
    core.submit(make_request(core, [1]))  # let in with the one that has waited long enough
    clock.now = 2.0
    assert core.seconds_to_work() == 0.0
    assert len(core.step()) == 2


def test_who_was_let_in_once_need_not_wait_for_company_again() -> None:
    clock = Clock()
    core = gated(clock, max_num_batched_tokens=8)
    for token in range(3):
        core.submit(make_request(core, [token] * 8, GenerationConfig(max_new_tokens=1)))
    assert [len(core.step()) for _ in range(3)] == [1, 1, 1]
    core.submit(make_request(core, [1]))
    assert core.step() == []  # a newcomer waits again


def test_a_fork_that_is_queued_in_the_place_of_its_source_is_let_in_with_the_others() -> None:
    core = gated(Clock(), max_num_seqs=1)
    for name, count in (("two", 2), ("b", 1), ("c", 1)):
        config = GenerationConfig(max_new_tokens=1, n=count)
        core.submit(make_request(core, [1], config, request_id=name))
    core.abort("two", 0)
    ended = [o.request_id for _ in range(4) for o in core.step() if o.finish_reason == "length"]
    assert sorted(ended) == ["b", "c", "two"]


def test_no_company_is_waited_for_that_would_find_no_place() -> None:
    core = gated(Clock(), min_batch_size=8, max_num_seqs=2)
    for _ in range(2):
        core.submit(make_request(core, [1]))
    assert len(core.step()) == 2


@pytest.mark.parametrize("deadline", [1.0, 5.0])
def test_a_deadline_wakes_before_the_gate(deadline: float) -> None:
    clock = Clock()
    core = gated(clock)
    core.submit(make_request(core, [1], deadline=deadline))
    assert core.seconds_to_work() == min(deadline, 2.0)
    clock.now = core.seconds_to_work()
    reasons = [output.finish_reason for output in core.step()]
    assert reasons == (["time_limit"] if deadline < 2.0 else [None])


def test_without_a_gate_there_is_always_something_to_do() -> None:
    core = make_fake_core()
    assert core.seconds_to_work() == math.inf
    core.submit(make_request(core, [1]))
    while core.has_work:
        assert core.seconds_to_work() == 0.0
        core.step()
    assert run_to_end(core) == {}


def test_running_requests_are_not_held_back_by_the_gate() -> None:
    core = gated(Clock(), min_batch_size=2)
    for _ in range(2):
        core.submit(make_request(core, [1], GenerationConfig(max_new_tokens=5)))
    core.step()
    core.submit(make_request(core, [1]))
    assert [len(core.step()) for _ in range(4)] == [2, 2, 2, 2]
    assert core.stats().num_waiting == 1

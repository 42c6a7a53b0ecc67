"""Requests with several choices, seen from outside: one id, an index, and no trace afterwards."""

import pytest

from swiftjax.engine.core import EngineCore
from swiftjax.engine.request import GenerationConfig, StepOutput
from swiftjax.errors import InvalidRequestError, QueueFullError
from tests.fakes import make_fake_core, make_request

TWO = GenerationConfig(max_new_tokens=3, n=2)


def run(core: EngineCore) -> list[StepOutput]:
    """Everything that is said until nothing is left to do."""
    outputs: list[StepOutput] = []
    while core.has_work:
        outputs += core.step()
        core.scheduler.check_integrity()
    assert core.stats().num_free_pages == core.stats().num_pages
    return outputs


def tokens_of(outputs: list[StepOutput], index: int) -> list[int]:
    return [i for output in outputs if output.index == index for i in output.token_ids]


def test_each_choice_is_told_under_the_id_of_the_request() -> None:
    core = make_fake_core()
    core.submit(make_request(core, [5], TWO, request_id="a"))
    outputs = run(core)
    assert {output.request_id for output in outputs} == {"a"}
    assert tokens_of(outputs, 0) == tokens_of(outputs, 1) == [6, 7, 8]
    core.submit(make_request(core, [5], TWO, request_id="a"))  # the id is free again
    assert len(run(core)) == len(outputs)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_an_id_in_use_is_refused(first: int, second: int) -> None:
    core = make_fake_core()
    for count, refused in ((first, False), (second, True)):
        config = GenerationConfig(max_new_tokens=3, n=count)
        request = make_request(core, [5], config, request_id="a")
        if refused:
            with pytest.raises(InvalidRequestError, match="'a' is already in use"):
                core.submit(request)
        else:
            core.submit(request)
    assert tokens_of(run(core), 0) == [6, 7, 8]


def test_one_choice_is_aborted_and_the_other_goes_on() -> None:
    core = make_fake_core()
    core.submit(make_request(core, [5], TWO, request_id="a"))
    core.step()
    core.abort("a", 0)
    outputs = run(core)
    assert [o.finish_reason for o in outputs if o.index == 0] == ["abort"]
    assert tokens_of(outputs, 1) == [6, 7, 8]


def test_a_request_that_is_refused_half_way_leaves_nothing() -> None:
    core = make_fake_core(max_queue_len=2)
    core.submit(make_request(core, [5], request_id="b"))
    with pytest.raises(QueueFullError):
        core.submit(make_request(core, [5], TWO, request_id="a"))
    assert all(o.finish_reason == "abort" for o in run(core) if o.request_id == "a")
    core.submit(make_request(core, [5], GenerationConfig(max_new_tokens=3), request_id="a"))
    assert tokens_of(run(core), 0) == [6, 7, 8]


def test_more_choices_than_the_queue_holds_are_refused_at_the_door() -> None:
    core = make_fake_core(max_queue_len=3)
    config = GenerationConfig(max_new_tokens=3, n=4)
    with pytest.raises(InvalidRequestError, match=r"n is 4.*holds 3.*raise max_queue_len"):
        core.submit(make_request(core, [5], config, request_id="a"))
    assert not core.has_work


@pytest.mark.parametrize("num_steps", range(12))
def test_abort_leaves_no_choice_while_some_run_and_some_wait(num_steps: int) -> None:
    core = make_fake_core(max_num_seqs=3, num_pages=6)
    config = GenerationConfig(max_new_tokens=8, n=7)
    core.submit(make_request(core, [5], config, request_id="a"))
    core.submit(make_request(core, [9], TWO, request_id="other"))
    told = [o for _ in range(num_steps) for o in core.step()]
    ended = [o.index for o in told if o.request_id == "a" and o.finish_reason]
    core.abort("a")
    core.abort("a")  # as when a stream is closed while an abort of its own is on the way
    outputs = core.step()
    core.scheduler.check_integrity()
    last = [o for o in outputs if o.request_id == "a"]
    assert {o.finish_reason for o in last} <= {"abort"} and not any(o.token_ids for o in last)
    assert sorted(ended + [o.index for o in last]) == list(range(7))
    core.submit(make_request(core, [5], config, request_id="a"))  # the id is free again
    core.abort("a")
    assert tokens_of([o for o in told + outputs + run(core) if o.request_id == "other"], 1) == [
        10,
        11,
        12,
    ]

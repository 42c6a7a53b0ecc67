"""The parts of the scheduler one by one: states, who joins a step, who gives way."""

from swiftjax.engine.core import EngineCore
from swiftjax.engine.plan import PlanDraft
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from tests.fakes import make_fake_core, make_request

SWAP = PreemptionCosts(host_pages=100, seconds_per_token=1.0)
LONG = GenerationConfig(max_new_tokens=20, ignore_eos=True)


def submit(core: EngineCore, *names: str, config: GenerationConfig = LONG) -> None:
    for name in names:
        core.submit(make_request(core, [1, 2, 3], config, request_id=name))


def states(core: EngineCore) -> dict[str, str]:
    return {name: s.state for name, s in core.scheduler.sequences.by_id.items()}


def test_a_sequence_goes_through_its_states() -> None:
    core = make_fake_core(max_num_seqs=2)
    table = core.scheduler.sequences
    submit(core, "a", "b", "c")
    assert states(core) == dict.fromkeys("abc", "waiting")
    core.step()
    assert states(core) == {"a": "running", "b": "running", "c": "waiting"}
    table.preempt(table.by_id["b"], swapped=False)
    assert states(core)["b"] == "preempted" and table.by_id["b"].computed_len == 0
    table.pause("b")
    table.pause("c")  # whoever waits stands beside the preempted, and comes back like them
    assert states(core) == {"a": "running", "b": "preempted", "c": "preempted"}
    assert not table.may_come_back and table.comebacks() == []
    table.resume("c")
    assert [s.request.request_id for s in table.comebacks()] == ["c"]
    table.finish(table.by_id["a"])
    assert "a" not in table.by_id and not table.running
    core.scheduler.check_integrity()


def test_the_preempted_join_before_forks_and_these_before_newcomers() -> None:
    core = make_fake_core(max_num_seqs=3, max_num_batched_tokens=16)
    submit(core, "many", config=GenerationConfig(max_new_tokens=20, ignore_eos=True, n=2))
    submit(core, "old")
    core.step()  # the prompts; the fork waits until its source's page is computed
    assert states(core) == {"many/0": "running", "many/1": "forking", "old": "running"}
    submit(core, "new")
    core.scheduler.preemption.preempt_next()  # "old" was submitted last of those that run
    core.step()
    assert states(core)["old"] == "preempted" and states(core)["many/1"] == "forking"
    plan = core.scheduler.schedule(0.0)
    assert [s.request.request_id for s in plan.admitted] == ["old", "many/1"]
    assert states(core)["new"] == "waiting"  # three rows are taken


def test_who_pauses_is_not_swapped_and_others_are() -> None:
    core = make_fake_core(max_num_seqs=3, costs=SWAP)
    submit(core, "a", "b", "c")
    core.step()
    core.pause("a")
    core.scheduler.preemption.preempt_next()
    core.scheduler.schedule(0.0)
    assert states(core) == {"a": "preempted", "b": "running", "c": "swapped"}
    assert core.scheduler.num_preemptions == 2


def test_while_a_step_is_in_flight_it_is_only_noted_that_pages_are_short() -> None:
    core = make_fake_core(num_pages=2, page_size=4, max_num_seqs=2)
    submit(core, "a", "b", config=GenerationConfig(max_new_tokens=3, ignore_eos=True))
    core.step()
    preemption, table = core.scheduler.preemption, core.scheduler.sequences
    draft = PlanDraft(16, in_flight=True)
    assert not preemption.take_pages(draft, table.by_id["a"], 1)
    assert draft.is_short and preemption.is_due and not core.scheduler.num_preemptions
    draft = PlanDraft(16)
    assert preemption.take_pages(draft, table.by_id["a"], 1)
    assert draft.is_short and states(core) == {"a": "running", "b": "preempted"}

"""Simulated times are the hand-computed ones; cost models; requests that are drawn."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from swiftjax.config import SchedulerConfig
from swiftjax.engine.policies import PolicyState
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import Request
from swiftjax.errors import InvalidRequestError
from swiftjax.replay.cost_model import CostModel, fit, load_of, read_cost_model, relative_error
from swiftjax.replay.metrics import Goal, summarise
from swiftjax.replay.simulation import simulate
from swiftjax.replay.timelines import Simulated
from swiftjax.replay.workload import Moment, RecordedStep, StandIns, Workload, draw, make_arrival

COSTS = PreemptionCosts(host_pages=64, seconds_per_page=1.0, seconds_per_token=10.0)
MODEL = CostModel(base=1.0, prefill_token=0.1, decode_sequence=0.01, context_token=0.0)


def test_times_of_a_simulation_are_the_hand_computed_ones() -> None:
    arrivals = tuple(
        make_arrival(
            StandIns(number=number, page_size=4, labels=()),
            prompt_len=prompt_len,
            max_new_tokens=new,
            submitted=Moment(time, 0),
            arrival=time,
            output_len=new,
        )
        for number, (time, prompt_len, new) in enumerate([(5.0, 10, 3), (5.5, 5, 2), (99.0, 1, 1)])
    )
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=100)
    workload = Workload(config=config, page_size=4, num_pages=64, arrivals=arrivals)
    run = simulate(workload, Simulated(MODEL))
    a, b, late = run.outcomes
    # 2 s: the prompt of a; 1.51 s: a decodes, the prompt of b; 1.02 s: both decode
    assert (a.waiting, a.ttft, a.gaps) == (0.0, 2.0, pytest.approx([1.51, 1.02]))
    assert (b.waiting, b.ttft, b.gaps) == (1.5, pytest.approx(3.01), pytest.approx([1.02]))
    assert (late.waiting, late.finish_reason) == (0.0, "stop")
    assert run.times == [5.0, 7.0, pytest.approx(8.51), 99.0]
    summary = summarise("fcfs", run, Goal(ttft=2.5, inter_token=1.3))
    assert (summary.requests, summary.answered, summary.steps) == (3, 3, 4)
    assert summary.waiting.mean == pytest.approx(0.5)
    assert summary.goodput == pytest.approx(2 / 3)  # b waited too long for its first token
    assert summary.seconds == pytest.approx(99.0 + 1.01 - 5.0)
    assert summary.tokens_per_second == pytest.approx(6 / summary.seconds)


def test_moved_pages_cost_time_and_a_full_queue_refuses() -> None:
    workload = replace(drawn(rate=1000, count=20), num_pages=70, costs=COSTS)
    workload = replace(workload, config=replace(workload.config, max_queue_len=10))
    slow, fast = (simulate(workload, Simulated(MODEL, seconds_per_page=s)) for s in (1.0, 0.0))
    assert slow.num_preemptions and slow.times[-1] > fast.times[-1]
    reasons = [outcome.finish_reason for outcome in slow.outcomes]
    assert set(reasons) == {"refused", "length"} and reasons.count("refused") == 9
    summary = summarise("fcfs", slow, Goal(ttft=1e9, inter_token=1e9))
    assert (summary.refused, summary.goodput) == (9, 11 / 20)


def test_overlapped_steps_keep_the_device_busy() -> None:
    """Alone, a request gets its tokens at the same times; the loop runs ahead by one step."""
    workload = drawn(rate=1.0, count=1)
    plain, overlapped = (simulate(workload, Simulated(MODEL, overlaps=o)) for o in (False, True))
    [one], [other] = plain.outcomes, overlapped.outcomes
    assert other.gaps == pytest.approx(one.gaps) and other.ttft == one.ttft
    assert overlapped.times[1] == plain.times[0] and overlapped.times[2] == plain.times[1]


def drawn(rate: float, count: int) -> Workload:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512)
    return Workload(
        config=config, page_size=16, num_pages=512, arrivals=draw(f"poisson:{rate}", count, 7)
    )


def test_drawn_requests_have_the_lengths_of_w3() -> None:
    arrivals = drawn(8, 512).arrivals
    rng = random.Random(7)
    prompts, outputs = ([rng.randint(*r) for _ in range(512)] for r in ((64, 512), (64, 256)))
    assert [len(a.request.prompt_token_ids) for a in arrivals] == prompts
    assert [a.request.max_new_tokens for a in arrivals] == outputs
    times = [a.request.arrival_time for a in arrivals]
    assert times == sorted(times) and 50 < times[-1] < 80
    assert len({a.request.options.client_id for a in arrivals}) == 4
    assert arrivals == drawn(8, 512).arrivals
    with pytest.raises(InvalidRequestError, match="poisson:8"):
        draw("uniform:8", 1, 1)


def test_shortest_first_beats_fcfs_and_a_policy_of_ones_own_is_taken() -> None:
    def longest_first(request: Request, state: PolicyState) -> int:
        return -len(request.prompt_token_ids) - request.max_new_tokens

    workload, waits = drawn(rate=50, count=9).resized(max_num_seqs=2), {}
    for policy in ("fcfs", "shortest-first", longest_first):
        run = simulate(
            replace(workload, config=replace(workload.config, policy=policy)), Simulated(MODEL)
        )
        waits[policy] = summarise("x", run, Goal()).waiting.mean
    assert waits["shortest-first"] < waits["fcfs"] < waits[longest_first]


def test_cost_model_is_found_again_despite_compilations() -> None:
    rng = random.Random(1)
    model = CostModel(base=5e-3, prefill_token=2e-5, decode_sequence=3e-5, context_token=4e-8)
    steps = []
    for i in range(400):
        who = [(i, rng.randrange(2000), 1, 1) for i in range(rng.randint(1, 64))]
        who += [(99, 0, rng.randint(2, 2000), 1)] if rng.random() < 0.3 else []
        took = model.seconds(load_of((start, num) for _, start, num, _ in who))
        took *= rng.uniform(0.99, 1.01) if i % 40 else 1000.0
        steps.append(RecordedStep(0.0, took, False, tuple(who)))
    found = fit(steps)
    for name, value in model.as_dict().items():
        assert found.as_dict()[name] == pytest.approx(value, rel=0.02), name
    assert relative_error(found, steps) < 0.01


def test_no_number_of_a_cost_model_is_below_zero() -> None:
    steps = [
        RecordedStep(0.0, took, False, tuple((i, 10, 1, 1) for i in range(count)))
        for count, took in ((1, 3.0), (2, 2.0), (3, 1.0))
    ]
    assert min(fit(steps).as_dict().values()) >= 0
    with pytest.raises(InvalidRequestError, match="no steps"):
        fit([RecordedStep(0.0, 1.0, False, ())])


def test_cost_models_come_from_presets_and_files(tmp_path: Path) -> None:
    assert read_cost_model("llama3-8b-h200").base > 0
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL.as_dict()))
    assert read_cost_model(str(path)) == MODEL
    for bad in ("[]", "{", '{"base": 1}', json.dumps(MODEL.as_dict() | {"base": -1})):
        path.write_text(bad)
        with pytest.raises(InvalidRequestError, match=re.escape(str(path))):
            read_cost_model(str(path))
    with pytest.raises(InvalidRequestError, match="neither a preset"):
        read_cost_model("h100")

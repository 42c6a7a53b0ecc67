"""A trace run again gives the plans that were recorded; what is no trace is told."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swiftjax.batch import Batch, PageMoves, Sampled, Scores
from swiftjax.engine.core import EngineCore
from swiftjax.engine.policies import QUEUE_POLICIES
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import InvalidRequestError
from swiftjax.replay.simulation import simulate
from swiftjax.replay.timelines import Recorded
from swiftjax.replay.trace_file import read_trace
from tests.fakes import ContextRunner, FakePending, make_fake_core, make_request, trace_core

VOCAB, PAGES, PAGE = 97, 16, 4
COSTS = PreemptionCosts(host_pages=8, seconds_per_page=1.0, seconds_per_token=0.7)


class ScoringRunner(ContextRunner):
    """Scores every prompt token, so that scored prompts are done with some time."""

    def dispatch(self, batch: Batch, moves: PageMoves) -> FakePending:
        """Answer as usual; all scores are 0."""
        pending = super().dispatch(batch, moves)
        count = len(batch.token_ids)
        scores = Scores(np.zeros(count), np.zeros((count, 1), int), np.zeros((count, 1)))

        def wait(num_rows: int) -> Sampled:
            return Sampled(pending._token_ids[:num_rows], [0.0] * num_rows, prompt=scores)

        pending.wait = wait
        return pending


class Clients:
    """Chats, choices, scored prompts, aborts and deadlines, at random."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        self.core = core
        self.rng = random.Random(seed)
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}  # prompt and answer of requests with one choice
        self.done: list[list[int]] = []
        core._clock = lambda: self.now

    def ask(self) -> None:
        """Submit something new, or the next turn of a chat."""
        rng = self.rng
        prompt = rng.choice(self.done)[:24] if self.done and rng.random() < 0.5 else []
        prompt = [*prompt, *(rng.randrange(20) for _ in range(rng.randint(1, 9)))]
        scored, wide = rng.random() < 0.2, rng.random() < 0.2
        config = GenerationConfig(
            max_new_tokens=rng.randint(1, 16),
            prompt_logprobs=1 if scored else None,
            n=3 if wide else 1,
        )
        late = rng.random() < 0.2
        request = make_request(
            self.core,
            prompt,
            config,
            deadline=self.now + 20 * rng.random() if late else None,
            client_id=rng.choice("abc"),
            priority=rng.randrange(3),
            cache_salt=rng.choice(["", "x"]),
        )
        self.core.submit(replace(request, arrival_time=self.now))
        self.tokens[request.request_id] = prompt

    def run(self, steps: int) -> None:
        """Let time pass; then wait until all is answered."""
        while steps > 0 or self.core.has_work:
            self.now += self.rng.random()
            if steps > 0 and self.rng.random() < 0.4:
                self.ask()
            if self.tokens and self.rng.random() < 0.2:
                command = self.rng.choice([self.core.abort, self.core.pause, self.core.resume])
                command(self.rng.choice(sorted(self.tokens)[-6:]))
            if steps <= 0:
                for request_id in self.tokens:
                    self.core.resume(request_id)
            for output in self.core.step():
                self.tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None and not output.index:
                    self.done.append(self.tokens[output.request_id])
            steps -= 1


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_same_policy_and_times_give_the_recorded_plans(
    policy: str, overlaps: bool, tmp_path: Path
) -> None:
    core = make_fake_core(
        vocab_size=VOCAB, num_pages=PAGES, page_size=PAGE, max_model_len=60, max_num_seqs=4,
        max_num_batched_tokens=13, policy=policy, costs=COSTS, eos_token_ids=tuple(range(0, 97, 9)),
        runner=ScoringRunner(VOCAB, PAGES, PAGE), overlaps=overlaps,
    )  # fmt: skip
    clients = Clients(core, seed=len(policy))
    tracer = trace_core(core, tmp_path / "trace")
    clients.run(120)
    tracer.close()
    lines = tracer._lines
    assert not (lines._numbers or lines._prompt_keys or lines._sequences), "what ended is kept"
    workload = read_trace(tmp_path / "trace")
    written = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    timeline = Recorded(workload.steps)
    run = simulate(workload, timeline)
    assert timeline.num_equal == len(workload.steps) > 60
    assert run.num_preemptions == core.scheduler.num_preemptions
    ends = {line["n"]: line for line in written if line["kind"] == "finish"}
    for number, outcome in enumerate(run.outcomes):
        assert outcome.finish_reason == ends[number]["reason"]
        assert outcome.num_tokens == ends[number]["output_len"]


HEADER = (
    '{"kind":"swiftjax-trace","version":1,"scheduler":{},"costs":{},"page_size":4,"num_pages":8}'
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no header"),
        ("hello\n", "line 1: not a JSON object"),
        ('{"kind":"step"}\n', "no header"),
        (HEADER.replace("1", "2", 1) + "\n", "version 2"),
        (HEADER + '\n{"kind":"step"}\n', "line 2"),
        (HEADER + '\n{"kind":"dance"}\n', "line 2"),
        (HEADER.replace("{}", '{"speed":1}', 1) + "\n", "speed"),
    ],
)
def test_what_is_no_trace_is_told_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(InvalidRequestError, match=words):
        read_trace(tmp_path / "trace")


def test_a_line_cut_short_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(HEADER + '\n{"kind":"st')
    workload = read_trace(tmp_path / "trace")
    assert (workload.page_size, workload.arrivals, workload.steps) == (4, (), ())


@pytest.mark.parametrize("seconds_per_token", [0.0, 9.0], ids=["recompute", "swap"])
def test_preemption_is_repeated(seconds_per_token: float, tmp_path: Path) -> None:
    costs = replace(COSTS, seconds_per_token=seconds_per_token)
    core = make_fake_core(num_pages=8, page_size=4, max_model_len=32, costs=costs)
    tracer = trace_core(core, tmp_path / "trace")
    for i in range(4):
        core.submit(make_request(core, [i] * 7, GenerationConfig(max_new_tokens=14)))
    while core.has_work:
        core.step()
    tracer.close()
    workload = read_trace(tmp_path / "trace")
    timeline = Recorded(workload.steps)
    run = simulate(workload, timeline)
    assert timeline.num_equal == len(workload.steps)
    assert run.num_preemptions == core.scheduler.num_preemptions > 0


def test_another_policy_gives_other_plans(tmp_path: Path) -> None:
    core = make_fake_core(num_pages=PAGES, page_size=PAGE)
    clients = Clients(core, seed=5)
    tracer = trace_core(core, tmp_path / "trace")
    clients.run(100)
    tracer.close()
    workload = read_trace(tmp_path / "trace")
    other = replace(workload, config=replace(workload.config, policy="shortest-first"))
    timeline = Recorded(workload.steps)
    simulate(other, timeline)
    assert timeline.num_equal < len(workload.steps)

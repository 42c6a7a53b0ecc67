"""The same request in different circumstances: what must not change its answer, for any model.

A model's test gives prompts and a way to make cores over one compiled runner.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from swiftjax.config import SchedulerConfig
from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from tests.fakes import make_request

MAX_SEQS, BUDGET = 4, 32
SWAP = PreemptionCosts(host_pages=10**6, seconds_per_token=1.0)
RECOMPUTE = PreemptionCosts()


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """How a core is built and what else goes on in it."""

    budget: int = BUDGET
    costs: PreemptionCosts = RECOMPUTE
    preempt_every: int = 0  # steps
    prefix_cache: bool = False
    num_runs: int = 1  # the last one counts
    overlaps: bool = False
    backwards: bool = False  # other slots and rows: the last prompt comes first
    neighbour: bool = False  # an unseeded request that comes first and ends earlier


CIRCUMSTANCES = {
    "together": Circumstances(),
    "backwards": Circumstances(backwards=True),
    "unseeded neighbour": Circumstances(neighbour=True),
    "chunks of 5": Circumstances(budget=5),
    "chunks of 13, overlapped": Circumstances(budget=13, overlaps=True),
    "swapped": Circumstances(costs=SWAP, preempt_every=3),
    "recomputed": Circumstances(preempt_every=4),
    "swapped, overlapped": Circumstances(costs=SWAP, preempt_every=3, overlaps=True),
    "cold cache": Circumstances(prefix_cache=True),
    "warm cache": Circumstances(prefix_cache=True, num_runs=2),
    "warm cache, recomputed": Circumstances(prefix_cache=True, num_runs=2, preempt_every=3),
}

Answer = tuple[list[int], list[float]]
Ask = tuple[list[int], GenerationConfig]
MakeCore = Callable[[SchedulerConfig, PreemptionCosts, bool], EngineCore]


def run(make_core: MakeCore, asks: SequenceOf[Ask], how: Circumstances) -> list[Answer]:
    """Tokens and log-probabilities of every request, all submitted at once."""
    config = SchedulerConfig(
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=how.budget,
        prefix_cache=how.prefix_cache,
    )
    core = make_core(config, how.costs, how.overlaps)
    for _ in range(how.num_runs):
        answers = _run_once(core, asks, how)
    assert bool(core.scheduler.num_preemptions) == bool(how.preempt_every)
    assert core.stats().num_free_pages == core.stats().num_pages
    return answers


def _run_once(core: EngineCore, asks: SequenceOf[Ask], how: Circumstances) -> list[Answer]:
    if how.neighbour:
        draws = GenerationConfig(max_new_tokens=4, temperature=1.0, top_k=9)
        core.submit(make_request(core, [5, 6, 7], draws, seed=99))
    requests = [make_request(core, *ask) for ask in asks]
    answers: dict[str, Answer] = {request.request_id: ([], []) for request in requests}
    for request in reversed(requests) if how.backwards else requests:
        core.submit(request)
    steps = 0
    while core.has_work:
        steps += 1
        if how.preempt_every and steps % how.preempt_every == 0:
            core.scheduler.preemption.preempt_next()
        for output in core.step():
            tokens, logprobs = answers.get(output.request_id, ([], []))
            tokens += output.token_ids
            logprobs += output.logprobs
        core.scheduler.check_integrity()
    return list(answers.values())


def alone(make_core: MakeCore, asks: SequenceOf[Ask]) -> list[Answer]:
    """Every request in an engine that does nothing else."""
    return [run(make_core, [ask], Circumstances())[0] for ask in asks]


def assert_same(got: SequenceOf[Answer], want: SequenceOf[Answer], tolerance: float) -> None:
    """Tokens are identical and log-probabilities as close as asked."""
    for (tokens, logprobs), (want_tokens, want_logprobs) in zip(got, want, strict=True):
        assert tokens == want_tokens
        np.testing.assert_allclose(logprobs, want_logprobs, atol=tolerance, rtol=0)


def assert_same_shapes_agree(make_core: MakeCore, asks: SequenceOf[Ask]) -> None:
    """Equal shapes, other neighbours, other pages and other rows: 1e-5.

    The first request runs beside three others, then beside three different ones of the same
    lengths, in another place of the batch.
    """
    prompt, config = asks[0]
    greedy = GenerationConfig(max_new_tokens=config.max_new_tokens, ignore_eos=True)

    def beside(first: int) -> list[Ask]:
        return [([first + i] * len(prompt), greedy) for i in range(MAX_SEQS - 1)]

    mine = (prompt, dataclasses.replace(config, ignore_eos=True))
    before = run(make_core, [mine, *beside(10)], Circumstances())[0]
    after = run(make_core, [*beside(20), mine], Circumstances())[-1]
    assert_same([after], [before], 1e-5)
    again = run(make_core, [mine, *beside(10)], Circumstances())[0]
    assert again == before

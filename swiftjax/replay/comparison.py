"""The same requests under several queue policies, in figures.

Called by the `replay` command; of use in a notebook too.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from swiftjax.config import QueuePolicyChoice
from swiftjax.engine.policies import policy_name
from swiftjax.replay.cost_model import CostModel
from swiftjax.replay.metrics import Goal, Run, Summary, summarise
from swiftjax.replay.simulation import simulate
from swiftjax.replay.timelines import Simulated
from swiftjax.replay.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One run per policy, in the order asked for."""

    workload: Workload
    goal: Goal
    names: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def summaries(self) -> list[Summary]:
        """The figures of every run."""
        pairs = zip(self.names, self.runs, strict=True)
        return [summarise(name, run, self.goal) for name, run in pairs]

    def as_json(self) -> dict[str, Any]:
        """All figures with the sizes and the goal they hold for; times in seconds."""
        config = self.workload.config
        return {
            "sizes": {
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "page_size": self.workload.page_size,
                "num_pages": self.workload.num_pages,
            },
            "goal": asdict(self.goal),
            "policies": [summary.as_json() for summary in self.summaries],
        }


def compare(
    workload: Workload, policies: Iterable[QueuePolicyChoice], model: CostModel, goal: Goal
) -> Study:
    """Simulate a workload under each policy."""
    chosen = list(policies)
    seconds_per_page = workload.costs.seconds_per_page
    runs = [
        simulate(
            workload.with_policy(policy),
            Simulated(model, seconds_per_page=seconds_per_page, overlaps=workload.overlaps),
        )
        for policy in chosen
    ]
    names = tuple(policy_name(policy) for policy in chosen)
    return Study(workload=workload, goal=goal, names=names, runs=tuple(runs))

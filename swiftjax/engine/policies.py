"""Who goes first, and who gives way: each policy is one function, free to be replaced.

A queue policy maps (request, state) to a sort key, smallest first. Keys may depend on the state as
long as the key of a waiting request never falls while it waits. A victim policy picks the sequence
that gives up its pages. Neither sees pages, rows or the device.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from swiftjax.config import QueuePolicyName, VictimPolicyName
from swiftjax.engine.request import Request
from swiftjax.engine.sequence import Sequence
from swiftjax.engine.served_tokens import owner_of

SHORT_TOKENS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyState:
    """What a queue policy may look at besides the request."""

    served_tokens: Mapping[str, int]  # per client: tokens computed for it so far
    served_by_owner: Mapping[str, int]  # the same per owner of clients


QueuePolicy = Callable[[Request, PolicyState], Any]
VictimPolicy = Callable[[SequenceOf[Sequence]], Sequence]


def fcfs(request: Request, state: PolicyState) -> Any:
    """First come, first served."""
    return request.arrival_time


def priority(request: Request, state: PolicyState) -> Any:
    """Higher priority first, then first come."""
    return (-request.options.priority, request.arrival_time)


def shortest_first(request: Request, state: PolicyState) -> Any:
    """Fewest tokens to compute at most first: the least mean waiting time, long ones may starve."""
    return len(request.prompt_token_ids) + request.max_new_tokens


def short_before_long(request: Request, state: PolicyState) -> Any:
    """Two classes by prompt length, first come within each."""
    return (len(request.prompt_token_ids) > SHORT_TOKENS, request.arrival_time)


def fair(request: Request, state: PolicyState) -> Any:
    """The client served least goes first (Sheng et al., "Fairness in Serving LLMs").

    Among clients of one owner, that is: between owners it is the owner served least.
    """
    client_id = request.options.client_id
    by_owner = state.served_by_owner.get(owner_of(client_id), 0)
    return (by_owner, state.served_tokens.get(client_id, 0), request.arrival_time)


def newest(running: SequenceOf[Sequence]) -> Sequence:
    """Whoever was submitted last gives way; the oldest therefore always gets on."""
    return max(running, key=lambda sequence: sequence.order)


def least_important(running: SequenceOf[Sequence]) -> Sequence:
    """The lowest priority gives way, the newest among equals."""
    return max(running, key=lambda s: (-s.request.options.priority, s.order))


def policy_name(policy: QueuePolicyName | QueuePolicy) -> str:
    """What a policy is called in reports and traces."""
    return policy if isinstance(policy, str) else getattr(policy, "__name__", "custom")


def find_queue_policy(policy: QueuePolicyName | QueuePolicy) -> QueuePolicy:
    """The function of a policy given by name, or the function itself."""
    return policy if callable(policy) else QUEUE_POLICIES[policy]


def victim_policy_for(policy: QueuePolicyName | QueuePolicy) -> VictimPolicyName:
    """Whoever matters most must not be the one to give way because it came last."""
    return "least-important" if policy == "priority" else "newest"


QUEUE_POLICIES: dict[QueuePolicyName, QueuePolicy] = {
    "fcfs": fcfs,
    "priority": priority,
    "shortest-first": shortest_first,
    "short-before-long": short_before_long,
    "fair": fair,
}
VICTIM_POLICIES: dict[VictimPolicyName, VictimPolicy] = {
    "newest": newest,
    "least-important": least_important,
}

"""A queue policy of one's own: who must start soonest goes first, and nobody waits for ever.

    swiftjax replay --synthetic poisson:60 --policy examples/my_policy.py:soonest_due
    Engine("smollm2-135m", policy=soonest_due)

A policy is a function of a request and a state; the smallest result starts first. It may look at
request.arrival_time, .deadline, .max_new_tokens, len(.prompt_token_ids), and at .options: priority,
client_id, session_id. state.served_tokens says how many tokens were computed for each client. What
it returns for a request may grow while the request waits, but never shrink.
"""

from swiftjax.engine.policies import PolicyState
from swiftjax.engine.request import Request

PATIENCE = {0: 4.0, 1: 1.0, 2: 0.25}  # seconds a request of each priority can wait


def soonest_due(request: Request, state: PolicyState) -> float:
    """The time by which a request should have started: by its priority or by its deadline."""
    patience = PATIENCE.get(request.options.priority, 4.0)
    due = request.arrival_time + patience
    return due if request.deadline is None else min(due, request.deadline)

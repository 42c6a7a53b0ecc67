"""Who made the call that runs: known where the key is checked, needed where requests are ended.

A context variable, because grpc hands our handlers nothing else that could carry it.
"""

from contextvars import ContextVar
from typing import NamedTuple

from swiftjax.engine.checks import MAX_LABEL_CHARS
from swiftjax.engine.text_threads import set_owner


class Caller(NamedTuple):
    """A name that does not tell the key; empty, and an admin, where there are no keys.

    `trace_parent` names the span under which the caller wants to see the call (W3C).
    """

    name: str = ""
    is_admin: bool = False
    trace_parent: str = ""


_current: ContextVar[Caller] = ContextVar("caller")


def current_caller() -> Caller:
    """Tell who called."""
    return _current.get(Caller())


def turns_of(client_id: str) -> str:
    """Whose turn it is where the queue is fair: the key's, or the client's that it speaks for.

    Clients of different keys are never the same, so that no key can use up another's turns.
    """
    name = current_caller().name
    return f"{name}/{client_id}"[:MAX_LABEL_CHARS] if name and client_id else name or client_id


def set_caller(caller: Caller) -> None:
    """Say so for the task that handles the call."""
    _current.set(caller)
    set_owner(caller.name)

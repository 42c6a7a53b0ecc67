"""Queue policies named on the command line: a built-in one, or a function in a file of one's own.

Running the file is what the user asks for; nothing else here trusts it.
"""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import typer

from swiftjax.config import QUEUE_POLICY_NAMES, QueuePolicyChoice, QueuePolicyName
from swiftjax.errors import InvalidRequestError


def read_policy(text: str) -> QueuePolicyChoice:
    """Find the policy that is meant by a name or by path/to/file.py:function.

    Raises InvalidRequestError where there is none; what the file itself raises goes through.
    """
    if text in QUEUE_POLICY_NAMES:
        return cast(QueuePolicyName, text)
    path, _, name = text.rpartition(":")
    if not path.endswith(".py"):
        raise InvalidRequestError(
            f"policy {text!r} is unknown; choose one of {', '.join(QUEUE_POLICY_NAMES)}, or write "
            "path/to/file.py:function"
        )
    return _load(Path(path), name)


def parse_policy(text: str) -> QueuePolicyChoice:
    """The same for an option: whatever is not found is bad usage."""
    try:
        return read_policy(text)
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error)) from error


def _load(path: Path, name: str) -> Callable[..., Any]:
    if not path.is_file():
        raise InvalidRequestError(f"there is no file {path} to take the policy {name!r} from")
    spec = importlib.util.spec_from_file_location("swiftjax_policy_file", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    policy = getattr(module, name, None)
    if not callable(policy):
        raise InvalidRequestError(f"{path} has no function {name!r}")
    try:
        inspect.signature(policy).bind(None, None)
    except TypeError as error:
        raise InvalidRequestError(
            f"{path}:{name} must take two arguments, (request, state): {error}"
        ) from error
    return policy

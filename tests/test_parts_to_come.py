"""Parts of otherwise tested cases whose feature does not exist yet.

Each is expected to fail, strictly: once the feature is there the mark must go and the part must be
tested in full.
"""

import importlib

import pytest

from swiftjax import GenerationConfig


@pytest.mark.xfail(strict=True, raises=TypeError, reason="B001: constrained answers do not exist")
def test_b001_answer_constrained_to_one_value() -> None:
    """The answer constrained to one character of several tokens is streamed whole."""
    GenerationConfig(choice=["\U0001fae0"])  # type: ignore[call-arg]


@pytest.mark.xfail(
    strict=True,
    raises=ModuleNotFoundError,
    reason="B003, B006, B019, B050, B054, B069: their HTTP parts wait for the HTTP server",
)
@pytest.mark.parametrize("case", ["b003", "b006", "b019", "b050", "b054", "b069"])
def test_http_part(case: str) -> None:
    """What the case asks of gRPC and Python holds over HTTP too."""
    importlib.import_module("swiftjax.serving.http_server")

"""Parts of otherwise tested cases whose feature does not exist yet.

Each is expected to fail, strictly: once the feature is there the mark must go and the part must be
tested in full.
"""

import pytest

from swiftjax import GenerationConfig


@pytest.mark.xfail(strict=True, raises=TypeError, reason="B001: constrained answers do not exist")
def test_b001_answer_constrained_to_one_value() -> None:
    """The answer constrained to one character of several tokens is streamed whole."""
    GenerationConfig(choice=["\U0001fae0"])  # type: ignore[call-arg]

"""A failure counts where the machine ran, and is tried again where it stood still."""

import threading

import pytest

from tests.stalls import TRIES, StallWatch, tried_again_after_stalls


def test_a_failure_while_the_machine_ran_is_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StallWatch, "ran", lambda watch: True)
    tries: list[None] = []

    @tried_again_after_stalls
    def fails() -> None:
        tries.append(None)
        pytest.fail("too slow")

    with pytest.raises(pytest.fail.Exception, match="too slow"):
        fails()
    assert len(tries) == 1


@pytest.mark.parametrize("num_failures", [0, 2, TRIES])
def test_a_failure_after_a_stall_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    monkeypatch.setattr("tests.stalls.STALL_SECONDS", -1.0)
    tries: list[str] = []

    @tried_again_after_stalls
    def fails(name: str) -> None:
        tries.append(name)
        assert len(tries) > num_failures

    if num_failures < TRIES:
        fails("x")
    else:
        with pytest.raises(AssertionError):
            fails("x")
    assert tries == ["x"] * min(num_failures + 1, TRIES)
    assert not any(thread.name == "stalls" for thread in threading.enumerate())

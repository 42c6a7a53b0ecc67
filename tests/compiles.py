"""How many programs XLA was asked for in this process, whoever asked: jit, AOT or an eager op."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_count = 0


def _listen(event: str, duration: float, **_: str | int) -> None:
    global _count
    _count += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compiles() -> int:
    """Programs compiled, or fetched from the compilation cache, so far."""
    return _count


@contextmanager
def no_compiles() -> Iterator[None]:
    """Assert that nothing inside needs the compiler."""
    before = _count
    yield
    assert _count == before, f"{_count - before} programs were compiled"

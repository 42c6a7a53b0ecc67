"""Where the host's time goes while the engine decodes, stage by stage, without a profiler.

Calls of the engine's parts are timed from outside, so the engine has nothing for it and is slowed
down by a microsecond a call. Used beside `idle.py`, which looks at the device.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from swiftjax.api import Engine
from swiftjax.engine.core import PendingTokens

# In the order of a step: plan it, make its arrays and whatever else a core does, start it, wait for
# the step before, take its tokens in, make text of them.
STAGES = ("plan", "batch", "dispatch", "wait", "update", "text")


def time_stages(engine: Engine, num_steps: int) -> dict[str, float]:
    """Milliseconds of a step by stage, the mean of so many; something must be running."""
    core = engine.built.core
    watch = _Stopwatch()
    with (
        watch.on(core, "step", "core"),
        watch.on(core.scheduler, "schedule", "plan"),
        watch.on(core.scheduler, "update", "update"),
        watch.on(engine.built.runner, "dispatch", "dispatch", lambda made: _Waited(watch, made)),
    ):
        engine.step()  # whose tokens are waited for in the next one, under the watch
        watch.seconds.clear()
        start = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        whole = time.perf_counter() - start
    spent = watch.seconds
    spent["text"] = whole - spent["core"]
    spent["batch"] = spent["core"] - sum(spent[x] for x in ("plan", "dispatch", "wait", "update"))
    return {stage: spent[stage] / num_steps * 1e3 for stage in STAGES}


class _Stopwatch:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def on(
        self, owner: object, method: str, name: str, wrap: Callable[[Any], Any] = lambda made: made
    ) -> Iterator[None]:
        """Time a method of one object; what it gives is wrapped."""
        plain = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.running(name):
                return wrap(plain(*args, **kwargs))

        setattr(owner, method, timed)
        try:
            yield
        finally:
            delattr(owner, method)  # the class's own is seen again

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Time what is done in the context."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


class _Waited:
    """Tokens of a step; how long they are waited for counts."""

    def __init__(self, watch: _Stopwatch, pending: PendingTokens) -> None:
        self._watch = watch
        self._pending = pending

    def wait(self, num_rows: int) -> Any:
        """As the tokens' own."""
        with self._watch.running("wait"):
            return self._pending.wait(num_rows)

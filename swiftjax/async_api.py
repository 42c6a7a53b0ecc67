"""`start_async_engine`: an AsyncEngine whose engine is a thread of this process.

`swiftjax serve` has its engine in a process of its own instead (`cli/served_engines.py`).
"""

from collections.abc import Callable

from swiftjax.build import build_core
from swiftjax.config import EngineConfig
from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.engine_link import ThreadLink


def start_async_engine(
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
    *,
    warm_up: bool = True,
) -> AsyncEngine:
    """Build a core and put it behind an engine thread of this process.

    Without `warm_up` a step is compiled when it is first needed, and everybody waits for it.
    """
    built = build_core(config, progress, warms_up=warm_up)
    if warm_up:
        built.warm_up()
    core = built.core
    return AsyncEngine(
        ThreadLink(core),
        built.tokenizer,
        core.limits,
        config.readers,
        session_limits=config.sessions,
    )

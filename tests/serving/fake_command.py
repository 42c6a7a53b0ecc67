"""The `swiftjax` command, but what `serve` serves is the fake engine, on a thread.

`python -m tests.serving.fake_command serve ...`: options, ports, keys and certificates are those of
the real command.
"""

from swiftjax.cli import main, served_engines
from swiftjax.config import EngineConfig
from swiftjax.engine.engine_link import ThreadLink
from swiftjax.engine.link_messages import EngineInfo
from tests.serving.harness import MODEL, byte_tokenizer, make_core


async def start_engine(
    config: EngineConfig, *, policy: str, quiet: bool
) -> tuple[ThreadLink, EngineInfo]:
    """Stand in for the function that starts an engine process."""
    core = make_core()
    rows = core.scheduler.config.max_num_seqs
    return ThreadLink(core), EngineInfo(core.limits, MODEL, byte_tokenizer().files, rows)


if __name__ == "__main__":
    served_engines.start_engine = start_engine  # type: ignore[assignment]
    main()

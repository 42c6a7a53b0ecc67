"""The `swiftjax` command, but what `serve` serves is the fake engine.

`python -m tests.serving.fake_command serve ...`: options, ports, keys and certificates are those of
the real command.
"""

import sys
from pathlib import Path

from swiftjax.cli import main
from swiftjax.config import EngineConfig
from swiftjax.serving.engine_watch import EngineWatch
from swiftjax.serving.messages import describe_model
from swiftjax.serving.served import Served
from tests.serving.harness import MODEL, make_core, make_engine


async def start(config: EngineConfig, policy: str, quiet: bool, watch: EngineWatch) -> Served:
    """Stand in for the function that starts an engine process."""
    core = make_core()
    engine = make_engine(core, config.readers, watch.take)
    name = Path(config.model_path).name
    return Served(engine, describe_model(name, MODEL, core.limits, engine.tokenizer), watch)


if __name__ == "__main__":
    sys.modules["swiftjax.cli.serve"]._start = start  # type: ignore[attr-defined]
    main()

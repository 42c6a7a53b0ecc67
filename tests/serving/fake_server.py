"""A server process over the fake engine: `python -m tests.serving.fake_server PORT [DIE_AFTER]`.

Prints the lines that `run_server` announces. With DIE_AFTER the engine breaks at that step.
"""

import asyncio
import sys

from swiftjax.engine.core import EngineCore
from swiftjax.engine.scheduler import Plan
from swiftjax.serving.listeners import Listen
from swiftjax.serving.messages import describe_model
from swiftjax.serving.served import Served
from swiftjax.serving.server import run_server
from tests.serving.harness import MODEL, make_core, make_engine


def break_after(core: EngineCore, num_steps: int) -> None:
    """Let the scheduler raise at a step."""
    schedule = core.scheduler.schedule
    counter = iter(range(num_steps))

    def counted(now: float, *, in_flight: bool = False) -> Plan:
        if next(counter, None) is None:
            raise RuntimeError("broken on purpose")
        return schedule(now, in_flight=in_flight)

    core.scheduler.schedule = counted  # type: ignore[method-assign]


def load() -> Served:
    """A warm fake engine."""
    core = make_core(delay=0.02, max_num_seqs=64, num_pages=100_000)
    if len(sys.argv) > 2:
        break_after(core, int(sys.argv[2]))
    engine = make_engine(core)
    return Served(engine, describe_model("bytes", MODEL, core.limits, engine.tokenizer))


if __name__ == "__main__":
    code = run_server(
        load,
        Listen(grpc_port=int(sys.argv[1]), http_port=0),
        drain_seconds=20.0,
        announce=lambda line: print(line, flush=True),
    )
    sys.exit(asyncio.run(code))

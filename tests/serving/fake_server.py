"""A server process over the fake engine: `python -m tests.serving.fake_server PORT`.

Prints the lines that `run_server` announces, and logs JSON on stderr. With --die-after the engine
breaks at that step; --keys is a file of API keys.
"""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from swiftjax.cli.json_log import write_json_lines
from swiftjax.engine.core import EngineCore
from swiftjax.engine.scheduler import Plan
from swiftjax.serving.keys import KeyEntry, KeyRing, parse_keys
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
    if ARGUMENTS.die_after is not None:
        break_after(core, ARGUMENTS.die_after)
    engine = make_engine(core)
    return Served(engine, describe_model("bytes", MODEL, core.limits, engine.tokenizer))


def read_keys() -> list[KeyEntry]:
    """What the file says now."""
    return parse_keys(ARGUMENTS.keys.read_text()) if ARGUMENTS.keys else []


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--keys", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()
    logging.basicConfig(level=logging.DEBUG)
    write_json_lines()
    code = run_server(
        load,
        Listen(grpc_port=ARGUMENTS.port, http_port=0, keys=KeyRing(read_keys)),
        drain_seconds=20.0,
        announce=lambda line: print(line, flush=True),
    )
    sys.exit(asyncio.run(code))

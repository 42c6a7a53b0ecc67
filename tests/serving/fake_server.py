"""A server process over the fake engine: `python -m tests.serving.fake_server PORT`.

Prints the lines that `run_server` announces, and logs JSON on stderr. A step takes --step-seconds,
and with --die-after the engine breaks at that one; --keys is a file of API keys; --apart runs the
engine in a process of its own, which takes --load-seconds to be ready, never returns from the step
--hang-after, is started again up to --max-restarts times and may be silent for
--max-silent-seconds.
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any, cast

import uvloop

from swiftjax.cli import served_engines
from swiftjax.cli.json_log import write_json_lines
from swiftjax.cli.served_engines import ServedEngines
from swiftjax.config import EngineConfig
from swiftjax.engine.link_messages import EngineInfo
from swiftjax.engine.process_link import ProcessLink
from swiftjax.serving.engine_watch import EngineWatch
from swiftjax.serving.keys import KeyEntry, KeyRing, parse_keys
from swiftjax.serving.listeners import Listen
from swiftjax.serving.messages import describe_model
from swiftjax.serving.served import Served
from swiftjax.serving.server import Load, run_server
from tests.fakes import FakeRunner
from tests.serving.fake_engine import COMMAND, Forgotten, break_after
from tests.serving.harness import MODEL, PATIENCE, make_core, make_engine

CORE: dict[str, Any] = {"max_num_seqs": 64, "num_pages": 100_000}
WATCH = EngineWatch()


async def load() -> Served:
    """A warm fake engine in this process."""
    core = make_core(**CORE | {"delay": ARGUMENTS.step_seconds})
    cast(FakeRunner, core._runner).batches = Forgotten()
    if ARGUMENTS.die_after is not None:
        break_after(core, ARGUMENTS.die_after)
    engine = make_engine(core, watch=WATCH.take)
    model = describe_model("bytes", MODEL, core.limits, engine.tokenizer)
    return Served(engine, model, WATCH)


async def start_fake(
    config: EngineConfig, *, policy: str, quiet: bool
) -> tuple[ProcessLink, EngineInfo]:
    """A process with a fake engine, in place of one that loads a model."""
    job = {
        "core": CORE | {"delay": ARGUMENTS.step_seconds},
        "seconds": ARGUMENTS.load_seconds,
        "path": config.model_path,
    }
    if ARGUMENTS.die_after is not None:
        job["die_after"] = ARGUMENTS.die_after
    if ARGUMENTS.hang_after is not None:
        job["hang_after"] = ARGUMENTS.hang_after
    link, info = await ProcessLink.start(COMMAND, json.dumps(job).encode())
    print(f"engine process {link.pid}", file=sys.stderr, flush=True)
    return link, info


def no_quota(max_num_seqs: int) -> None:
    """Nothing is limited by key."""


def load_apart() -> Load:
    """The engines of `swiftjax serve`, but for what they compute."""
    served_engines.start_engine = start_fake
    config = EngineConfig(model_path="bytes")
    return ServedEngines(config, policy="fcfs", quiet=True, beside={}, quota_for=no_quota).start


def read_keys() -> list[KeyEntry]:
    """What the file says now."""
    return parse_keys(ARGUMENTS.keys.read_text()) if ARGUMENTS.keys else []


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--hang-after", type=int)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--max-silent-seconds", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()
    logging.basicConfig(level=logging.DEBUG)
    write_json_lines()
    code = run_server(
        load_apart() if ARGUMENTS.apart else load,
        Listen(grpc_port=ARGUMENTS.port, http_port=0, keys=KeyRing(read_keys)),
        drain_seconds=2 * PATIENCE,  # so that no test takes its end for that of a drain
        announce=lambda line: print(line, flush=True),
        max_restarts=ARGUMENTS.max_restarts,
        max_silent_seconds=ARGUMENTS.max_silent_seconds,
    )
    sys.exit(uvloop.run(code))

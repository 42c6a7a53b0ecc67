"""The engine process of `swiftjax serve`: how it is started, and the program that it runs.

Not for users: it is handed the number of a socket and talks msgpack.
"""

import logging
import sys
from typing import Any, NamedTuple, get_type_hints

import msgspec

from swiftjax.cli.json_log import JsonFormatter, write_json_lines
from swiftjax.cli.loading import load_core
from swiftjax.cli.policy_file import read_policy
from swiftjax.config import EngineConfig
from swiftjax.engine.engine_process import BuiltEngine, run_engine_process
from swiftjax.engine.link_messages import EngineInfo
from swiftjax.engine.process_link import ProcessLink

COMMAND = (sys.executable, "-m", "swiftjax.cli.engine_process")


class _Job(NamedTuple):
    """What to build, and how to write logs meanwhile."""

    config: dict[str, Any]  # without the policy
    policy: str
    quiet: bool
    log_level: int
    logs_json: bool


async def start_engine(
    config: EngineConfig, *, policy: str, quiet: bool
) -> tuple[ProcessLink, EngineInfo]:
    """Start a process that loads a model and compiles every step; it logs as this one does.

    `policy` is written as on the command line and takes the place of the one in `config`, which
    may be a function.
    """
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    del fields["policy"]
    job = _Job(
        fields,
        policy,
        quiet,
        logging.getLogger("swiftjax").level,
        any(isinstance(h.formatter, JsonFormatter) for h in logging.getLogger().handlers),
    )
    return await ProcessLink.start(COMMAND, msgspec.msgpack.encode(job))


def _read_config(job: _Job) -> EngineConfig:
    values = {
        name: msgspec.convert(job.config[name], hint)
        for name, hint in get_type_hints(EngineConfig).items()
        if name != "policy"
    }
    return EngineConfig(**values, policy=read_policy(job.policy))


def _build(data: bytes) -> BuiltEngine:
    """Load a model and compile every step, as a job says."""
    job = msgspec.msgpack.decode(data, type=_Job)
    logging.getLogger("swiftjax").setLevel(job.log_level)
    if job.logs_json:
        write_json_lines()
    config = _read_config(job)
    built = load_core(config, warm=True, quiet=job.quiet)
    if config.sessions.folder is not None:
        built.runner.fingerprint()  # compiles, so not when the first session is saved
    from swiftjax.model.device_report import Devices
    from swiftjax.weight_swap import WeightSwap

    # From here on nothing should be compiled any more, and whatever is gets counted.
    devices = Devices()
    max_num_seqs = built.core.scheduler.config.max_num_seqs
    info = EngineInfo(built.core.limits, built.model_config, built.tokenizer.files, max_num_seqs)
    return BuiltEngine(built.core, info, devices.report, WeightSwap(config, built))


def main() -> int:
    """Serve the front end that started this process."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    return run_engine_process(int(sys.argv[1]), _build)


if __name__ == "__main__":
    sys.exit(main())

"""An engine process over a fake runner: `python -m tests.serving.fake_engine FILE`.

Its job is a JSON object: `core` has the arguments of make_core, `die_after` breaks it at that step,
it takes `seconds` to build, and `refuse` is an error that it raises then.
"""

import json
import sys
import time

from swiftjax.engine.core import EngineCore
from swiftjax.engine.engine_process import BuiltEngine, run_engine_process
from swiftjax.engine.link_messages import EngineInfo
from swiftjax.engine.scheduler import Plan
from swiftjax.errors import CheckpointError
from tests.serving.harness import MODEL, byte_tokenizer, make_core

COMMAND = [sys.executable, "-m", "tests.serving.fake_engine"]


def break_after(core: EngineCore, num_steps: int) -> None:
    """Let the scheduler raise at a step."""
    schedule = core.scheduler.schedule
    counter = iter(range(num_steps))

    def counted(now: float, *, in_flight: bool = False) -> Plan:
        if next(counter, None) is None:
            raise RuntimeError("broken on purpose")
        return schedule(now, in_flight=in_flight)

    core.scheduler.schedule = counted  # type: ignore[method-assign]


def build(job: bytes) -> BuiltEngine:
    """Make the engine that a job asks for."""
    asked = json.loads(job)
    time.sleep(asked.get("seconds", 0.0))
    if "refuse" in asked:
        raise CheckpointError(asked["refuse"])
    core = make_core(**asked.get("core", {}))
    if "die_after" in asked:
        break_after(core, asked["die_after"])
    return BuiltEngine(core, EngineInfo(core.limits, MODEL, byte_tokenizer().files))


if __name__ == "__main__":
    sys.exit(run_engine_process(int(sys.argv[1]), build))

"""An engine process over a fake runner: `python -m tests.serving.fake_engine FILE`.

Its job is a JSON object: `core` has the arguments of make_core, `die_after` breaks it at that step,
`hang_after` lets that step never return, it takes `seconds` to build, and `refuse` is an error that
it raises then. `path` names its weights; with `no_grammars` compiling one is a bug.
"""

import json
import sys
import threading
import time
from typing import cast

from swiftjax.batch import Batch, PageMoves
from swiftjax.engine.constraint import Constraint
from swiftjax.engine.core import EngineCore, PendingTokens
from swiftjax.engine.engine_process import BuiltEngine, run_engine_process
from swiftjax.engine.grammar import Grammar, GrammarCompiler
from swiftjax.engine.link_messages import EngineInfo
from swiftjax.engine.scheduler import Plan
from swiftjax.errors import CheckpointError, InvalidRequestError
from swiftjax.memory import DeviceMemory, DeviceReport
from tests.fakes import FakeRunner
from tests.serving.harness import MODEL, byte_tokenizer, make_core

DEVICES = DeviceReport(2, 0.5, (DeviceMemory("gpu:0", 3, 10),))
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


def hang_after(core: EngineCore, num_steps: int) -> None:
    """Let a step never return."""
    dispatch = core._runner.dispatch
    counter = iter(range(num_steps))

    def counted(batch: Batch, moves: PageMoves) -> PendingTokens:
        if next(counter, None) is None:
            threading.Event().wait()
        return dispatch(batch, moves)

    core._runner.dispatch = counted  # type: ignore[method-assign]


def break_grammars() -> None:
    """Let every compilation raise what nobody meant."""

    def compile(self: GrammarCompiler, constraint: Constraint) -> Grammar:
        raise MemoryError

    GrammarCompiler.compile = compile  # type: ignore[method-assign]


class Forgotten(list[Batch]):
    """What a runner was asked, if nobody will look: a few hundred KB a step otherwise."""

    def append(self, batch: Batch) -> None:
        """Forget it."""


class FakeWeights:
    """Those in the file "doubled" count up by twos; a "broken" one does not fit."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._path = ""

    def read(self, path: str) -> None:
        """Refuse what is broken."""
        if path == "broken":
            raise InvalidRequestError("tensor head of broken is [1]; the running model's is [2]")
        self._path = path

    def forget(self) -> None:
        """Have nothing that could be used."""
        self._path = "nothing"

    def use(self) -> None:
        """Count in other steps."""
        assert self._path != "nothing"
        cast(FakeRunner, self._core._runner).stride = 2 if self._path == "doubled" else 1


def build(job: bytes) -> BuiltEngine:
    """Make the engine that a job asks for."""
    asked = json.loads(job)
    time.sleep(asked.get("seconds", 0.0))
    if "refuse" in asked:
        raise CheckpointError(asked["refuse"])
    core = make_core(**asked.get("core", {}))
    if asked.get("no_grammars"):
        break_grammars()
    if "die_after" in asked:
        break_after(core, asked["die_after"])
    if "hang_after" in asked:
        hang_after(core, asked["hang_after"])
    if asked.get("forgets"):
        cast(FakeRunner, core._runner).batches = Forgotten()
    weights = FakeWeights(core)
    weights.read(asked.get("path", ""))
    weights.use()
    rows = core.scheduler.config.max_num_seqs
    info = EngineInfo(core.limits, MODEL, byte_tokenizer().files, rows)
    return BuiltEngine(core, info, lambda: DEVICES, weights)


if __name__ == "__main__":
    sys.exit(run_engine_process(int(sys.argv[1]), build))

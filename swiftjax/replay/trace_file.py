"""Reads the lines that `engine/trace_lines.py` writes.

A last line without its end, as a crash of the machine may leave, is ignored. Called by the `replay`
command and by tests.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from swiftjax.config import SchedulerConfig
from swiftjax.engine.observer import Command
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import RequestOptions
from swiftjax.engine.trace_lines import FORMAT, KEY_BYTES, VERSION
from swiftjax.errors import InvalidRequestError
from swiftjax.replay.workload import (
    Arrival,
    Moment,
    RecordedStep,
    StandIns,
    ToldTo,
    Workload,
    make_arrival,
)

Line = dict[str, Any]
COMMANDS: tuple[Command, ...] = get_args(Command)


def read_trace(path: Path) -> Workload:
    """Read a whole trace; raises InvalidRequestError where it is not one, naming the line."""
    lines = _read_lines(path)
    number, header = next(lines, (1, {}))
    if header.get("kind") != FORMAT:
        raise InvalidRequestError(f"{path} is not a trace: its first line is no header")
    if header.get("version") != VERSION:
        raise InvalidRequestError(
            f"{path} has format version {header.get('version')}; this is for version {VERSION}"
        )
    by_kind: dict[str, list[Line]] = {kind: [] for kind in ("submit", "step", "finish", *COMMANDS)}
    try:
        sizes = tuple(header["scheduler"].get("step_sizes", ()))
        config = SchedulerConfig(**(header["scheduler"] | {"step_sizes": sizes}))
        costs = PreemptionCosts(**header["costs"])
        for number, line in lines:  # noqa: B007  the message below names the last one
            by_kind[line["kind"]].append(line)
        ends = {line["n"]: line for line in by_kind["finish"]}
        make = _ArrivalMaker(header["page_size"], ends)
        return Workload(
            config=config,
            page_size=header["page_size"],
            num_pages=header["num_pages"],
            arrivals=tuple(make(line) for line in by_kind["submit"]),
            costs=costs,
            commands=tuple(_read_command(line) for kind in COMMANDS for line in by_kind[kind]),
            steps=tuple(_read_step(line) for line in by_kind["step"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{path} is not a trace that can be read, at or before line {number}: {error!r:.80}"
        ) from error


def _read_lines(path: Path) -> Iterator[tuple[int, Line]]:
    try:
        *whole, _ = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"cannot read the trace {path}: {error}") from error
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise InvalidRequestError(f"{path}, line {number}: not a JSON object")
        yield number, line


def _read_step(line: Line) -> RecordedStep:
    who = tuple(_read_share(*share) for share in line["who"])
    return RecordedStep(float(line["t"]), float(line["took"]), bool(line["in_flight"]), who)


def _read_share(
    number: int, start: int, num_new: int = 1, samples: int = 1
) -> tuple[int, int, int, int]:
    """One entry of a step; that of a decode is cut short."""
    return int(number), int(start), int(num_new), int(samples)


def _read_command(line: Line) -> ToldTo:
    return ToldTo(Moment(line["t"], line["step"]), line["kind"], line["n"])


class _ArrivalMaker:
    """Makes requests of lines; equal page keys become equal stand-ins."""

    def __init__(self, page_size: int, ends: dict[int, Line]) -> None:
        self._page_size = page_size
        self._ends = ends
        self._labels: dict[bytes, int] = {}

    def __call__(self, line: Line) -> Arrival:
        end = self._ends.get(line["n"], {})
        labels = [*self._read_keys(line["pages"]), *self._read_keys(end.get("pages", ""))]
        stand_ins = StandIns(number=line["n"], page_size=self._page_size, labels=tuple(labels))
        return make_arrival(
            stand_ins,
            prompt_len=line["prompt_len"],
            max_new_tokens=line["max_new_tokens"],
            submitted=Moment(line["t"], line["step"]),
            arrival=line["arrival"],
            output_len=end["output_len"] if end.get("reason") == "stop" else None,
            deadline=line["deadline"],
            options=RequestOptions(
                priority=line["priority"],
                client_id=line["client_id"],
                session_id=line["session_id"],
            ),
            scores_prompt=line["scores"],
            fork_of=line["fork_of"],
        )

    def _read_keys(self, text: str) -> list[int]:
        data = base64.b64decode(text, validate=True)
        keys = [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
        return [self._labels.setdefault(key, len(self._labels)) for key in keys]

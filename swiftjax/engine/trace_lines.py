"""The lines of a trace: one JSON object each, the first a header; docs/sandbox.md names the keys.

Holds no prompt text and no token ids: what requests share is told by hashes of their pages, made
with a secret that is thrown away. Called by the tracer.
"""

import base64
import datetime
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from swiftjax.engine.observer import Command
from swiftjax.engine.plan import Plan
from swiftjax.engine.policies import policy_name
from swiftjax.engine.prefix_cache import PageKeys
from swiftjax.engine.request import Request, StepOutput
from swiftjax.engine.scheduler import Scheduler
from swiftjax.engine.sequence import Sequence

VERSION = 1
FORMAT = "swiftjax-trace"
KEY_BYTES = 6  # of a page key: 48 bits, 8 characters


class Planned(NamedTuple):
    """A step was planned at `now`; what was there right after."""

    number: int
    plan: Plan
    now: float
    in_flight: bool  # the step before it was not read yet
    pages: tuple[int, int, int]  # in use, free, idle
    queues: tuple[int, int, int]  # running, waiting, those of the waiting that are preempted
    num_preemptions: int


def make_header(scheduler: Scheduler) -> str:
    """The first line: everything besides the requests that plans depend on."""
    return _line(
        kind=FORMAT,
        version=VERSION,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        scheduler={
            field.name: getattr(scheduler.config, field.name) for field in fields(scheduler.config)
        }
        | {"policy": policy_name(scheduler.config.policy)},
        page_size=scheduler.pool.page_size,
        num_pages=scheduler.pool.num_pages,
        costs=asdict(scheduler.preemption.costs),
    )


class LineMaker:
    """Makes lines, each with its newline. Requests are numbered in the order of submission."""

    def __init__(self, start: float, page_size: int, salt: Callable[[Request], str]) -> None:
        self._start = start
        self._keys = PageKeys(page_size, "")
        self._salt = salt
        self._numbers: dict[str, int] = {}  # of requests that have not ended
        self._prompt_keys: dict[str, list[bytes]] = {}
        self._sequences: dict[str, Sequence] = {}  # those that ran
        self._count = 0

    def submit(self, request: Request, now: float, step: int) -> str:
        """A request was taken before the step of this number was planned."""
        keys: list[bytes] = []
        self._keys.extend(keys, request.prompt_token_ids, self._salt(request))
        number, self._count = self._count, self._count + 1
        self._numbers[request.request_id] = number
        self._prompt_keys[request.request_id] = keys
        options, deadline = request.options, request.deadline
        return _line(
            kind="submit",
            n=number,
            id=request.request_id,
            t=self._seconds(now),
            step=step,
            arrival=self._seconds(request.arrival_time),
            prompt_len=len(request.prompt_token_ids),
            max_new_tokens=request.max_new_tokens,
            priority=options.priority,
            client_id=options.client_id,
            session_id=options.session_id,
            deadline=None if deadline is None else self._seconds(deadline),
            fork_of=self._numbers.get(request.fork_of or ""),
            scores=request.generation.prompt_logprobs is not None,
            pages=_shorten(keys),
        )

    def step(self, planned: Planned, took: float) -> str:
        """A step was read `took` seconds after it, or the step before it, had begun."""
        numbers, moves = self._numbers, planned.plan.moves
        for sequence in planned.plan.admitted:
            if sequence.request.request_id in numbers:  # it may have ended meanwhile
                self._sequences[sequence.request.request_id] = sequence
        return _line(
            kind="step",
            step=planned.number,
            t=self._seconds(planned.now),
            took=round(took, 6),
            in_flight=int(planned.in_flight),
            # Most shares are decodes, and there may be hundreds in each of many steps.
            who=[
                (sequence.order, start)
                if num_new == 1 and samples
                else (sequence.order, start, num_new, int(samples))
                for sequence, start, num_new, samples in planned.plan.work
            ],
            pages=dict(zip(("used", "free", "idle"), planned.pages, strict=True)),
            queue=dict(zip(("running", "waiting", "preempted"), planned.queues, strict=True)),
            preemptions=planned.num_preemptions,
            out=[(numbers.get(move.key), len(move.page_ids)) for move in moves.out],
            back=[(numbers.get(move.key), len(move.page_ids)) for move in moves.back],
            copies=len(moves.copies),
        )

    def finish(self, output: StepOutput, now: float, step: int) -> str:
        """A request ended before the step of this number was planned."""
        request_id = output.request_id
        keys = self._prompt_keys.pop(request_id)
        num_prompt_pages = len(keys)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._keys.extend(keys, sequence.token_ids, self._salt(sequence.request))
        return _line(
            kind="finish",
            n=self._numbers.pop(request_id),
            t=self._seconds(now),
            step=step,
            reason=output.finish_reason,
            output_len=0 if sequence is None else sequence.num_output,
            pages=_shorten(keys[num_prompt_pages:]),
        )

    def command(self, what: Command, request_id: str, now: float, step: int) -> str:
        """A request was told something; '' if it had ended, or never was."""
        number = self._numbers.get(request_id)
        if number is None:
            return ""
        return _line(kind=what, n=number, t=self._seconds(now), step=step)

    def _seconds(self, time: float) -> float:
        return round(time - self._start, 9)


def _shorten(keys: list[bytes]) -> str:
    """Keys side by side, 8 characters each; equal pages after equal prefixes have equal ones."""
    return base64.b64encode(b"".join(key[:KEY_BYTES] for key in keys)).decode()


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def _line(**fields: Any) -> str:
    return _encode(fields) + "\n"

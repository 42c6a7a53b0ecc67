"""The lines of a trace: one JSON object each, the first a header; docs/scheduler.md names the keys.

Holds no prompt text and no token ids: what requests share is told by hashes of their pages, made
with a secret that is thrown away. Called by the tracer's thread.
"""

import base64
import datetime
import json
from collections.abc import Callable
from dataclasses import asdict
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


class Submitted(NamedTuple):
    """A request was taken before the step of this number was planned."""

    request: Request
    now: float
    step: int


class Planned(NamedTuple):
    """A step was planned at `now`; what was there right after."""

    plan: Plan
    now: float
    in_flight: bool  # the step before it was not read yet
    pages: tuple[int, int, int]  # in use, free, idle
    queues: tuple[int, int, int]  # running, waiting, those of the waiting that are preempted
    num_preemptions: int


class Step(NamedTuple):
    """A step was read `took` seconds after it, or the step before it, had begun to compute."""

    number: int
    took: float
    planned: Planned


class Told(NamedTuple):
    """Outputs that came before the step of this number was planned."""

    outputs: list[StepOutput]
    now: float
    step: int


class ToldTo(NamedTuple):
    """A request was told something before the step of this number was planned."""

    what: Command
    request_id: str
    now: float
    step: int


Event = Submitted | Step | Told | ToldTo


def make_header(scheduler: Scheduler) -> str:
    """The first line: everything besides the requests that plans depend on."""
    return _line(
        kind=FORMAT,
        version=VERSION,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        scheduler=asdict(scheduler.config) | {"policy": policy_name(scheduler.config.policy)},
        page_size=scheduler.pool.page_size,
        num_pages=scheduler.pool.num_pages,
        costs=asdict(scheduler.costs),
    )


class LineMaker:
    """Turns events into lines. Requests are numbered in the order of submission."""

    def __init__(self, start: float, page_size: int, salt: Callable[[Request], str]) -> None:
        self._start = start
        self._keys = PageKeys(page_size, "")
        self._salt = salt
        self._numbers: dict[str, int] = {}  # of requests that have not ended
        self._requests: dict[str, tuple[Request, list[bytes]]] = {}
        self._sequences: dict[str, Sequence] = {}  # those that ran
        self._count = 0

    def of(self, event: Event) -> str:
        """The lines of one event, each with its newline; '' for none."""
        if isinstance(event, Submitted):
            return self._submit(event)
        if isinstance(event, Step):
            return self._step(event)
        if isinstance(event, ToldTo):
            return self._command(event)
        ended = (output for output in event.outputs if output.finish_reason is not None)
        return "".join(self._finish(event, output) for output in ended)

    def _submit(self, event: Submitted) -> str:
        request = event.request
        keys: list[bytes] = []
        self._keys.extend(keys, request.prompt_token_ids, self._salt(request))
        number, self._count = self._count, self._count + 1
        self._numbers[request.request_id] = number
        self._requests[request.request_id] = (request, keys)
        options, deadline = request.options, request.deadline
        return _line(
            kind="submit",
            n=number,
            id=request.request_id,
            t=self._seconds(event.now),
            step=event.step,
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

    def _step(self, event: Step) -> str:
        planned, numbers, moves = event.planned, self._numbers, event.planned.plan.moves
        for sequence in planned.plan.admitted:
            if sequence.request.request_id in self._requests:  # it may have ended meanwhile
                self._sequences[sequence.request.request_id] = sequence
        return _line(
            kind="step",
            step=event.number,
            t=self._seconds(planned.now),
            took=round(event.took, 6),
            in_flight=int(planned.in_flight),
            who=[
                (work.sequence.order, work.start, work.num_new, int(work.samples))
                for work in planned.plan.work
            ],
            pages=dict(zip(("used", "free", "idle"), planned.pages, strict=True)),
            queue=dict(zip(("running", "waiting", "preempted"), planned.queues, strict=True)),
            preemptions=planned.num_preemptions,
            out=[(numbers.get(move.request_id), len(move.page_ids)) for move in moves.out],
            back=[(numbers.get(move.request_id), len(move.page_ids)) for move in moves.back],
            copies=len(moves.copies),
        )

    def _finish(self, event: Told, output: StepOutput) -> str:
        request_id = output.request_id
        request, keys = self._requests.pop(request_id)
        num_prompt_pages = len(keys)
        sequence = self._sequences.pop(request_id, None)
        output_len = 0
        if sequence is not None:
            output_len = sequence.num_output
            self._keys.extend(keys, sequence.token_ids, self._salt(request))
        return _line(
            kind="finish",
            n=self._numbers.pop(request_id),
            t=self._seconds(event.now),
            step=event.step,
            reason=output.finish_reason,
            output_len=output_len,
            pages=_shorten(keys[num_prompt_pages:]),
        )

    def _command(self, event: ToldTo) -> str:
        number = self._numbers.get(event.request_id)
        if number is None:
            return ""  # it had ended, or never was
        return _line(kind=event.what, n=number, t=self._seconds(event.now), step=event.step)

    def _seconds(self, time: float) -> float:
        return round(time - self._start, 9)


def _shorten(keys: list[bytes]) -> str:
    """Keys side by side, 8 characters each; equal pages after equal prefixes have equal ones."""
    return base64.b64encode(b"".join(key[:KEY_BYTES] for key in keys)).decode()


def _line(**fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":")) + "\n"

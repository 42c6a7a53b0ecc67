"""How long a step takes, as four numbers: seconds = base + prefill + decode + context.

Fitted to the steps of a trace, taken from a preset, or read from a file. Knows nothing of clocks or
schedulers. Called by the simulation.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swiftjax.errors import InvalidRequestError
from swiftjax.replay.workload import RecordedStep


class Load(NamedTuple):
    """What a step has to do; one entry per coefficient of the model."""

    steps: int
    prefill_tokens: int
    decode_sequences: int
    context_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Seconds per step, per prefill token, per decoding sequence, per token attended to."""

    base: float
    prefill_token: float
    decode_sequence: float
    context_token: float

    def seconds(self, load: Load) -> float:
        """How long a step takes."""
        return (
            self.base * load.steps
            + self.prefill_token * load.prefill_tokens
            + self.decode_sequence * load.decode_sequences
            + self.context_token * load.context_tokens
        )

    def as_dict(self) -> dict[str, float]:
        """The four numbers by name, as a file for `--cost-model` has them."""
        return asdict(self)


PRESETS = {
    # Least squares of relative errors over latency.json and prefill.json of results/h200,
    # which it meets within 5 % for decodes and 10 % for prompts.
    "llama3-8b-h200": CostModel(
        base=3.82e-3, prefill_token=24.1e-6, decode_sequence=18.7e-6, context_token=35.7e-9
    ),
}
ROUNDS = 10


def load_of(work: Iterable[tuple[int, int]]) -> Load:
    """Sum up a step given as (start, new tokens) per sequence; one new token is a decode."""
    prefill = decodes = context = 0
    for start, num_new in work:
        context += start + num_new
        if num_new == 1:
            decodes += 1
        else:
            prefill += num_new
    return Load(1, prefill, decodes, context)


def fit(steps: Iterable[RecordedStep]) -> CostModel:
    """Fit the four numbers, none below zero, to recorded steps; raises InvalidRequestError.

    Least squares of relative errors, weighted anew ROUNDS times so that a step that lies far off,
    as one in which something was compiled does, counts no more than any other.
    """
    loads, seconds = _measured(steps)
    if not len(seconds):
        raise InvalidRequestError("the trace has no steps to learn from: give --cost-model")
    numbers = _solve(loads / seconds[:, None], np.ones(len(seconds)))
    for _ in range(ROUNDS):
        errors = np.abs(loads @ numbers / seconds - 1)
        weights = 1 / np.sqrt(np.maximum(errors, 1e-3))
        numbers = _solve(loads * (weights / seconds)[:, None], weights)
    return CostModel(**dict(zip(_names(), numbers.tolist(), strict=True)))


def relative_error(model: CostModel, steps: Iterable[RecordedStep]) -> float:
    """Median of |predicted - recorded| / recorded."""
    loads, seconds = _measured(steps)
    predicted = loads @ np.array(list(model.as_dict().values()))
    return float(np.median(np.abs(predicted / seconds - 1)))


def _measured(steps: Iterable[RecordedStep]) -> tuple[np.ndarray, np.ndarray]:
    """Loads, one row per step, and seconds."""
    timed = [step for step in steps if step.who and step.took > 0]
    loads = [load_of((start, num) for _, start, num, _ in step.who) for step in timed]
    return np.array(loads, np.float64).reshape(-1, 4), np.array([step.took for step in timed])


def _solve(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares without negative numbers: the best of all 16 choices of what is zero."""
    scale = np.where(rows.max(axis=0) > 0, rows.max(axis=0), 1.0)
    best, best_error = np.zeros(rows.shape[1]), np.inf
    for chosen in itertools.product([False, True], repeat=rows.shape[1]):
        columns = np.array(chosen)
        numbers = np.zeros(rows.shape[1])
        numbers[columns] = np.linalg.lstsq((rows / scale)[:, columns], values, rcond=None)[0]
        error = float(np.sum(((rows / scale) @ numbers - values) ** 2))
        if numbers.min() >= 0 and error < best_error:
            best, best_error = numbers, error
    return best / scale


def read_cost_model(name: str) -> CostModel:
    """A preset by its name, or a JSON file with the four numbers; raises InvalidRequestError."""
    if name in PRESETS:
        return PRESETS[name]
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
        numbers = {key: float(data[key]) for key in _names()}
    except OSError as error:
        raise InvalidRequestError(
            f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor a file: {error.strerror}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{name} must hold a JSON object with the numbers {', '.join(_names())}: {error!r}"
        ) from error
    if not all(0 <= number < float("inf") for number in numbers.values()):
        raise InvalidRequestError(f"{name} holds {numbers}; no number may be below 0")
    return CostModel(**numbers)


def _names() -> list[str]:
    return [field.name for field in fields(CostModel)]

"""What a step leaves on the device, and how the host reads it: only what its batch asked for.

Written by the compiled step of `runner.py`; waited for by the engine core.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from swiftjax.batch import NONE, NUM_TOP, Batch, Sampled, Scores
from swiftjax.model.logprobs import TokenScores


class StepResult(NamedTuple):
    """What a step leaves on the device for the host; floats travel as their bits."""

    tokens: Array  # [2 R] int32: token ids, log-probabilities
    top: Array  # [R 2 * NUM_TOP] int32: ids, log-probabilities
    prompt: Array | None  # [T 1 + 2 * NUM_TOP] int32; None in a decode bucket


class DeviceTokens:
    """The results of a step that may still be running; fetches what its batch asked for."""

    def __init__(self, result: StepResult, batch: Batch) -> None:
        self._tokens = result.tokens
        has_top = bool(batch.sampling.num_logprobs.any())
        has_targets = bool((batch.target_ids != NONE).any())
        self._top = result.top if has_top else None
        self._prompt = result.prompt if has_targets else None
        for array in (self._tokens, self._top, self._prompt):
            if array is not None:
                array.copy_to_host_async()

    def wait(self, num_rows: int) -> Sampled:
        """Block until the step is done; the first `num_rows` rows."""
        token_ids, bits = np.asarray(self._tokens)[:, :num_rows]
        logprobs = bits.view(np.float32)
        top = prompt = None
        if self._top is not None:
            top = _scores(logprobs, np.asarray(self._top)[:num_rows])
        if self._prompt is not None:
            words = np.asarray(self._prompt)
            prompt = _scores(words[:, 0].view(np.float32), words[:, 1:])
        return Sampled(token_ids.tolist(), logprobs.tolist(), top, prompt)


def _scores(logprobs: np.ndarray, top: np.ndarray) -> Scores:
    return Scores(logprobs, top[:, :NUM_TOP], top[:, NUM_TOP:].view(np.float32))


def as_bits(scores: TokenScores) -> tuple[Array, Array, Array]:
    """The fields of scores as int32 arrays, inside jit."""
    logprobs, top = (
        lax.bitcast_convert_type(x, jnp.int32) for x in (scores.logprobs, scores.top_logprobs)
    )
    return logprobs, scores.top_ids, top

"""What a step leaves on the device, and how the host reads it: only what its batch asked for.

Written by the programs of a step; waited for by the engine core.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from swiftjax.batch import NUM_TOP, Sampled, Scores
from swiftjax.model.logprobs import TokenScores


class DeviceTokens:
    """The results of a step that may still be running, on their way to the host."""

    def __init__(self, tokens: Array, top: Array | None, prompt: Array | None) -> None:
        """Floats travel as their bits.

        tokens [2 R] int32: token ids, log-probabilities. top [R 2 * NUM_TOP] int32: ids,
        log-probabilities. prompt [T 1 + 2 * NUM_TOP] int32. None: nobody asked.
        """
        self._tokens, self._top, self._prompt = tokens, top, prompt
        for array in (tokens, top, prompt):
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

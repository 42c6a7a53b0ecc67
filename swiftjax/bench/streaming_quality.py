"""What forgetting costs: perplexity of one long text under three rules of attention.

All of it, sinks and a window, and a window of the same size without sinks, as in the paper's figure
(arXiv 2309.17453). Tokens are handed in. Called by `swiftjax bench streaming`.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float64

from swiftjax.api import Engine
from swiftjax.bench.records import Figure
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.streaming import Streaming

NUM_PLACES = 32  # points of a curve


def measure_perplexity(
    engine: Engine, token_ids: Sequence[int], streaming: Streaming
) -> Iterator[Figure]:
    """Perplexity of all tokens but the first; details: of pieces of the text, one by one.

    `over_full` is its quotient with that of full attention, of the last half of the text, where the
    window is full.
    """
    rules = {
        "full": None,
        "sinks and window": streaming,
        "window": Streaming(sink=0, window=streaming.shared_len()),
    }
    half = len(token_ids) // 2
    full_half = math.nan
    for name, rule in rules.items():
        losses = _losses(engine, token_ids, rule)
        value, late = (float(np.exp(part.mean())) for part in (losses, losses[half:]))
        full_half = late if rule is None else full_half
        pieces = np.array_split(losses, NUM_PLACES)
        yield Figure(
            workload=f"perplexity, {name}", batch=1, context=len(token_ids), value=value,
            unit="perplexity", spread=(value, value),
            details={
                "sink": rule.sink if rule else None, "window": rule.window if rule else None,
                "late": round(late, 4), "over_full": round(late / full_half, 4),
                "places": np.cumsum([len(piece) for piece in pieces]).tolist(),
                "perplexity_at": [round(float(np.exp(piece.mean())), 3) for piece in pieces],
            },
        )  # fmt: skip


def _losses(
    engine: Engine, token_ids: Sequence[int], streaming: Streaming | None
) -> Float64[np.ndarray, " N"]:
    config = GenerationConfig(
        max_new_tokens=1, ignore_eos=True, prompt_logprobs=0, streaming=streaming
    )
    [answer] = engine.generate([list(token_ids)], config)
    assert answer.prompt is not None
    return -np.array(answer.prompt.logprobs[1:], np.float64)

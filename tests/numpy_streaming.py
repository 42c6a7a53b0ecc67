"""StreamingLLM's rule in plain float64: keys are kept unrotated, and rotated at every step.

Token by token, over our own parameter names; independent of pages, chunks and the double rotation.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from swiftjax.engine.streaming import Streaming
from swiftjax.model.rope import attention_factor, inverse_frequencies
from swiftjax.model_config import ModelConfig


def streaming_logits(
    config: ModelConfig,
    params: Mapping[str, object],
    token_ids: Sequence[int],
    streaming: Streaming,
) -> np.ndarray:
    """Logits [T V]; the cache never holds more than sink + window tokens."""
    weights = {name: np.asarray(values, np.float64) for name, values in params.items()}
    caches: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(config.num_layers)]
    logits = []
    for token in token_ids:
        x = weights["embed.embedding"][token]
        for i, cache in enumerate(caches):
            of = {
                name.removeprefix(prefix): values
                for name, values in weights.items()
                if name.startswith(prefix := f"layers.{i}.")
            }
            h = _norm(x, of["attention_norm.scale"], config.rms_norm_eps)
            x = x + _attend(config, of, h, cache, streaming, config.window(i))
            h = _norm(x, of["mlp_norm.scale"], config.rms_norm_eps)
            gate, up = np.split(h @ of["mlp.gate_up.kernel"], 2)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ of["mlp.down.kernel"]
        x = _norm(x, weights["norm.scale"], config.rms_norm_eps)
        logits.append(x @ weights["head.kernel"])
    return np.stack(logits)


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + eps) * scale


def _attend(
    config: ModelConfig,
    of: Mapping[str, np.ndarray],
    x: np.ndarray,
    cache: list[tuple[np.ndarray, np.ndarray]],
    streaming: Streaming,
    window: int,
) -> np.ndarray:
    n, k = config.num_heads, config.num_kv_heads
    heads = (x @ of["attention.qkv.kernel"]).reshape(-1, config.head_dim)
    cache.append((heads[n : n + k], heads[n + k :]))
    if len(cache) > streaming.sink + streaming.window:
        del cache[streaming.sink]
    places = np.arange(len(cache))
    q = _rotate(config, heads[:n], places[-1])
    keys = np.stack([_rotate(config, key, p) for p, (key, _) in zip(places, cache, strict=True)])
    values = np.stack([value for _, value in cache])
    keys, values = (np.repeat(a, n // k, axis=1) for a in (keys, values))
    scores = np.einsum("nh,cnh->nc", q, keys) / np.sqrt(config.head_dim)
    if window:  # of this layer
        scores[:, places <= places[-1] - window] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    out = np.einsum("nc,cnh->nh", weights, values)
    return out.reshape(-1) @ of["attention.output.kernel"]


def _rotate(config: ModelConfig, x: np.ndarray, place: int) -> np.ndarray:
    angles = place * inverse_frequencies(config.rope, config.head_dim)
    factor = attention_factor(config.rope)
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

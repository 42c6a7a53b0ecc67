"""A plain LLaMA forward pass over Hugging Face tensors in float64 numpy: no cache, batch or jax.

Independent of the engine's code; for full attention with the default rotary embedding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Round = Callable[[np.ndarray], np.ndarray]


def numpy_logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    token_ids: Sequence[int],
    activations: Round = lambda x: x,
) -> np.ndarray:
    """Logits [T V]; the head is lm_head.weight if it is there, else the embedding.

    `activations` is done to what goes into the projections of the layers.
    """
    weights = {name: values.astype(np.float64) for name, values in tensors.items()}
    eps = config["rms_norm_eps"]
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[np.asarray(token_ids)]
    for layer in range(config["num_hidden_layers"]):
        of = {
            name.removeprefix(prefix): values
            for name, values in weights.items()
            if name.startswith(prefix := f"model.layers.{layer}.")
        }
        h = activations(_norm(x, of["input_layernorm.weight"], eps))
        x = x + activations(_attention(config, of, h)) @ of["self_attn.o_proj.weight"].T
        h = activations(_norm(x, of["post_attention_layernorm.weight"], eps))
        gate, up = h @ of["mlp.gate_proj.weight"].T, h @ of["mlp.up_proj.weight"].T
        h = activations(gate / (1 + np.exp(-gate)) * up)
        x = x + h @ of["mlp.down_proj.weight"].T
    return _norm(x, weights["model.norm.weight"], eps) @ weights.get("lm_head.weight", embedding).T


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def _attention(
    config: Mapping[str, Any], of: Mapping[str, np.ndarray], x: np.ndarray
) -> np.ndarray:
    width = config["head_dim"]
    q, k, v = (
        (x @ of[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, width) for name in "qkv"
    )
    theta = config.get("rope_theta", 10_000.0)
    angles = np.outer(np.arange(len(x)), theta ** -(np.arange(0, width, 2) / width))
    q, k = _rotate(q, angles), _rotate(k, angles)
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qnh,knh->nqk", q, k) / np.sqrt(width)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("nqk,knh->qnh", weights, v).reshape(len(x), -1)


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

"""What the hardware allows at best: per part the larger of bytes over bandwidth, FLOPs over peak.

Parts are added up, as one follows the other. Plain numbers; no jax.
"""

from typing import NamedTuple

from swiftjax.model_config import ModelConfig


class Peaks(NamedTuple):
    """The best measured speeds of a card in bfloat16."""

    read: float  # bytes/s of large reads
    matmul: float  # FLOP/s of large matrix products
    attention: float  # FLOP/s of the best attention


# By what jax calls the device: large reads; the best cuBLAS products; cuDNN attention.
PEAKS = {"NVIDIA H200": Peaks(4.5e12, 788e12, 566e12)}


def decode_ms(config: ModelConfig, batch: int, context: int, peaks: Peaks) -> float:
    """Least milliseconds of a decode step in which every sequence attends to `context` tokens."""
    kv_bytes = batch * context * _kv_token_bytes(config)
    return 1e3 * (_linear_seconds(config, batch, batch, peaks) + kv_bytes / peaks.read)


def prefill_ms(config: ModelConfig, batch: int, length: int, peaks: Peaks) -> float:
    """Least milliseconds to compute `batch` prompts of `length` tokens and their first tokens."""
    # Causal: half of length ** 2 pairs, 2 products of 2 FLOPs per head element.
    per_prompt = 2 * config.num_layers * config.num_heads * config.head_dim * length**2
    attention = batch * per_prompt / peaks.attention
    return 1e3 * (_linear_seconds(config, batch * length, batch, peaks) + attention)


def _linear_seconds(config: ModelConfig, num_tokens: int, num_rows: int, peaks: Peaks) -> float:
    """All projections of a step; the head sees the sampled rows only."""
    c, seconds = config, 0.0
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    shapes = [
        (c.hidden_size, heads),
        (c.num_heads * c.head_dim, c.hidden_size),
        (c.hidden_size, 2 * c.intermediate_size),
        (c.intermediate_size, c.hidden_size),
    ]
    for rows, shape, times in [
        *((num_tokens, shape, c.num_layers) for shape in shapes),
        (num_rows, (c.hidden_size, c.vocab_size), 1),
    ]:
        size = shape[0] * shape[1]
        seconds += times * max(2 * size / peaks.read, 2 * rows * size / peaks.matmul)
    return seconds


def _kv_token_bytes(config: ModelConfig) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2

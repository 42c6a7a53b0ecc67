"""What every layer reads of a step, worked out once before the first: angles, tables, lengths.

Knows no weights. Called by `llama.py`, and by `layer_pass.py`, which runs one layer at a time.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from swiftjax import kernels
from swiftjax.batch import Batch
from swiftjax.model.rope import RopeTable, dynamic_rope_angles, rope_angles
from swiftjax.model.sink_view import SinkView, make_sink_view
from swiftjax.model_config import ModelConfig


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "slot_mapping",
        "page_table",
        "query_starts",
        "context_lens",
        "cos",
        "sin",
        "sinks",
    ),
    meta_fields=("is_decode", "whole_prompt", "row_invariant", "implementation", "attention"),
)
@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInputs:
    """What every layer reads of a step, worked out once; the arrays as in a Batch."""

    slot_mapping: Any  # [T] int32
    page_table: Any  # [B M] int32
    query_starts: Any  # [B+1] int32
    context_lens: Any  # [B] int32
    cos: Any  # [T H/2] float32
    sin: Any  # [T H/2] float32
    sinks: SinkView | None
    is_decode: bool  # one new token per sequence, and attention of its own for such steps
    whole_prompt: bool  # one sequence, all of it new
    row_invariant: bool  # a row's bits do not depend on what else its chunk holds
    implementation: kernels.Implementation
    attention: kernels.Implementation  # the same, or what it falls back to


def layer_inputs(
    config: ModelConfig,
    table: RopeTable,
    batch: Batch,
    implementation: kernels.Implementation,
    *,
    row_invariant: bool = False,
) -> LayerInputs:
    """Work out what all layers read of a batch.

    Mosaic's attention is for batches of long chunks: it is compiled anew at every start, 2 s for
    each shape, and gains nothing where chunks are short.
    """
    is_short = implementation == "mosaic" and not batch.shape.long_chunks
    cos, sin = _angles(config, table, batch)
    return LayerInputs(
        slot_mapping=batch.slot_mapping,
        page_table=batch.page_table,
        query_starts=batch.query_starts,
        context_lens=batch.context_lens,
        cos=cos,
        sin=sin,
        sinks=make_sink_view(config.rope, table, batch),
        # Decode attention sums up in another order than the attention of prompts.
        is_decode=batch.token_ids.shape == batch.context_lens.shape and not row_invariant,
        whole_prompt=batch.shape.whole_prompt,
        row_invariant=row_invariant,
        implementation=implementation,
        attention="triton" if is_short or implementation == "invariant" else implementation,
    )


def _angles(
    config: ModelConfig, table: RopeTable, batch: Batch
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    if config.rope.kind != "dynamic":
        return rope_angles(table, batch.positions)
    tokens = jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32)
    owner = jnp.searchsorted(batch.query_starts[1:], tokens, side="right")
    prompt_lens = jnp.take(batch.prompt_lens, owner, mode="clip")
    return dynamic_rope_angles(config.rope, table, batch.positions, prompt_lens)

"""A functional LLaMA: ragged batch and KV cache in, hidden states and KV cache out.

One module covers LLaMA 1-3.2, Mistral, Qwen2, Qwen3, SmolLM2 and TinyLlama by config alone. Layers
are unrolled, with one array per layer and matrix (a scan over stacked weights made an H200 step
three times slower). Modules are for construction and naming; `runner.py` splits them once and runs
a pure function of a flat tuple of arrays. Dimension letters: `swiftjax/batch.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from swiftjax import kernels
from swiftjax.batch import Batch
from swiftjax.model.kv_cache import KVCache
from swiftjax.model.layer_inputs import LayerInputs, layer_inputs
from swiftjax.model.linear import Linear
from swiftjax.model.rope import RopeTable
from swiftjax.model_config import ModelConfig


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalise the last axis."""
        return kernels.rms_norm(x, self.scale[...], self.eps)

    def lazy(self, x: Float[Array, "T D"]) -> kernels.Normed:
        """Leave it to the projection that reads the rows: it may want them in 8 bits."""
        return kernels.Normed(x=x, scale=self.scale[...], eps=self.eps)


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        c = config
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.window, self.eps = c.window(layer), c.rms_norm_eps
        width = c.num_heads * c.head_dim
        qkv_width = width + 2 * c.num_kv_heads * c.head_dim
        linear = functools.partial(Linear, dtype=dtype, rngs=rngs)
        form = c.weight_format(f"layers.{layer}.attention.qkv")
        self.qkv = linear(c.hidden_size, qkv_width, use_bias=c.qkv_bias, form=form)
        form = c.weight_format(f"layers.{layer}.attention.output")
        self.output = linear(width, c.hidden_size, use_bias=c.output_bias, form=form)
        norm = (lambda: RMSNorm(c.head_dim, eps=c.rms_norm_eps, dtype=dtype)) if c.qk_norm else None
        self.q_norm = norm() if norm else None
        self.k_norm = norm() if norm else None

    def __call__(
        self,
        residual: Float[Array, "T D"],
        x: kernels.Rows,
        keys: kernels.Pages,
        values: kernels.Pages,
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T D"], kernels.Pages, kernels.Pages]:
        """Write the new keys and values to their pages, then attend, and add it to a residual."""
        with jax.named_scope("qkv"):
            qkv = self.qkv(x, inputs.implementation)
        with jax.named_scope("rope"):
            q, keys, values = kernels.rope_write(
                keys,
                values,
                qkv,
                inputs.cos,
                inputs.sin,
                inputs.slot_mapping,
                q_norm=None if self.q_norm is None else self.q_norm.scale[...],
                k_norm=None if self.k_norm is None else self.k_norm.scale[...],
                eps=self.eps,
                implementation=inputs.implementation,
            )
        with jax.named_scope("attention"):
            out = self._attend(q, keys, values, inputs)
        rows = out.reshape(out.shape[0], -1)
        return self.output.added(residual, rows, inputs.implementation), keys, values

    def _attend(
        self,
        q: Float[Array, "T N H"],
        keys: kernels.Pages,
        values: kernels.Pages,
        inputs: LayerInputs,
    ) -> Float[Array, "T N H"]:
        scale = self.head_dim**-0.5
        streams = None if inputs.sinks is None else inputs.sinks.of(q, self.window)
        window = self.window if streams is None else 0
        if inputs.is_decode:
            return kernels.decode_attention(
                q,
                keys,
                values,
                inputs.page_table,
                inputs.context_lens,
                scale=scale,
                window=window,
                streams=streams,
                implementation=inputs.implementation,
            )
        return kernels.ragged_attention(
            q,
            keys,
            values,
            inputs.page_table,
            inputs.query_starts,
            inputs.context_lens,
            scale=scale,
            window=window,
            row_invariant=inputs.row_invariant,
            whole_prompt=inputs.whole_prompt,
            streams=streams,
            implementation=inputs.attention,
        )


class MLP(nnx.Module):
    """SwiGLU with the gate and up projections fused."""

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        d, f = config.hidden_size, config.intermediate_size

        linear = functools.partial(Linear, dtype=dtype, rngs=rngs, use_bias=config.mlp_bias)
        name = f"layers.{layer}.mlp"
        self.gate_up = linear(d, 2 * f, form=config.weight_format(f"{name}.gate_up"))
        self.down = linear(f, d, form=config.weight_format(f"{name}.down"))

    def __call__(
        self,
        residual: Float[Array, "T D"],
        x: kernels.Rows,
        implementation: kernels.Implementation,
    ) -> Float[Array, "T D"]:
        """residual + down(silu(gate(x)) * up(x))."""
        return self.down.added(residual, self.gate_up.gated(x, implementation), implementation)


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(dim, eps=eps, dtype=dtype)
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(dim, eps=eps, dtype=dtype)
        self.mlp = MLP(config, layer, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "T D"],
        keys: kernels.Pages,
        values: kernels.Pages,
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T D"], kernels.Pages, kernels.Pages]:
        """Attention and MLP, each with a residual."""
        x, keys, values = self.attention(x, self.attention_norm.lazy(x), keys, values, inputs)
        with jax.named_scope("mlp"):
            return self.mlp(x, self.mlp_norm.lazy(x), inputs.implementation), keys, values


# Layers of equal structure are traced and lowered once, not 32 times; the compiler inlines them.
@functools.partial(jax.jit, static_argnums=0)
def _run_block(
    structure: Any,  # nnx.GraphDef of a Block
    weights: Any,  # nnx.State of a Block
    x: Float[Array, "T D"],
    keys: kernels.Pages,
    values: kernels.Pages,
    inputs: LayerInputs,
) -> tuple[Float[Array, "T D"], kernels.Pages, kernels.Pages]:
    return nnx.merge(structure, weights)(x, keys, values, inputs)


class Embedding(nnx.Module):
    """Token embeddings; a tied head multiplies by the same table."""

    def __init__(self, vocab: int, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        init = jax.nn.initializers.normal(dim**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), (vocab, dim), dtype))


class Llama(nnx.Module):
    """The whole model."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        vocab, dim = config.vocab_size, config.hidden_size
        self.embed = Embedding(vocab, dim, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            Block(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(dim, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        linear = functools.partial(Linear, dtype=dtype, rngs=rngs, use_bias=False)
        self.head = None if tied else linear(dim, vocab, form=config.weight_format("head"))

    def __call__(
        self,
        batch: Batch,
        kv_cache: KVCache,
        rope_table: RopeTable,
        implementation: kernels.Implementation,
        *,
        row_invariant: bool = False,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Hidden states of every token after the last norm, and the cache with the new tokens."""
        inputs = layer_inputs(
            self.config, rope_table, batch, implementation, row_invariant=row_invariant
        )
        x = self.embed.embedding[...][batch.token_ids]
        keys, values = list(kv_cache.keys), list(kv_cache.values)
        for i, block in enumerate(self.layers):
            structure, weights = nnx.split(block)
            x, keys[i], values[i] = _run_block(structure, weights, x, keys[i], values[i], inputs)
        hidden = kernels.plain_rows(self.norm.lazy(x), implementation)
        return hidden, KVCache(keys=tuple(keys), values=tuple(values))

    def logits(
        self, hidden: Float[Array, "R D"], implementation: kernels.Implementation
    ) -> Float[Array, "R V"]:
        """Scores over the vocabulary in the model's dtype; widen them before comparing."""
        with jax.named_scope("head"):
            if self.head is None:
                table = self.embed.embedding[...]
                return kernels.matmul(
                    hidden, table, outputs_first=True, implementation=implementation
                )
            return self.head(hidden, implementation)

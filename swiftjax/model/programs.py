"""The compiled programs of a step: forward, then one of four samplers, then scores of prompts.

They are apart because a device-side condition makes the host wait for its outcome, which stalls the
whole next step; the host knows which sampler a batch needs anyway. A forward pass is compiled per
batch shape, a sampler per number of rows. Called by `runner.py` only.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from swiftjax.batch import NONE, Batch, BatchShape, SamplingBatch, TokenEdits, empty_edits
from swiftjax.model.compiler_options import forward_options
from swiftjax.model.kept_programs import KeptPrograms, Program
from swiftjax.model.kv_cache import KVCache
from swiftjax.model.logprobs import log_total, score_prompt
from swiftjax.model.packing import packed_sizes, unpack, unpack_sampling
from swiftjax.model.penalties import Counts, count_sampled
from swiftjax.model.sampling import (
    Logits,
    SampledTokens,
    draw,
    draw_filtered,
    greedy,
    sample,
)
from swiftjax.model.step_model import StepModel
from swiftjax.model.step_results import as_bits

# greedy: the most likely token of every row; random: a draw of whole distributions; filtered: of
# what top-k, top-p and min-p leave; full: anything
Sampler = Literal["greedy", "random", "filtered", "full"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)

# Tracing shares one interpreter; the compiler runs beside it, one program on one core.
NUM_THREADS = max(4, min(16, os.cpu_count() or 1))


class State(NamedTuple):
    """What a step hands to the next one on the device; donated, and rebound after every call."""

    kv_cache: KVCache
    last_tokens: Int[Array, " rows"]  # the newest token of each running sequence, by row
    counts: Counts


class Programs:
    """Compiles on demand; `warm_up` in `runner.py` asks for everything that can occur.

    Needs the shapes of weights and state only, not their values.
    """

    def __init__(self, model: StepModel, state: State, kept: KeptPrograms | None = None) -> None:
        """`state` is of shapes alone; `kept` are programs of earlier starts."""
        self.model = model
        self.state = state
        self._kept = kept
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}

    @property
    def count(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def of_shapes(self, shapes: list[BatchShape]) -> list[Callable[[], jax.stages.Compiled]]:
        """Functions that get everything steps of these shapes can need, the longest first."""
        row_counts = sorted({shape.num_seqs for shape in shapes})
        lengths = sorted({s.num_tokens for s in shapes if s.num_tokens > s.num_seqs})
        # So that no thread is left alone with a long one at the end.
        forwards = sorted(shapes, key=lambda shape: -shape.num_tokens)
        return [
            *(partial(self.forward, shape) for shape in forwards),
            *(partial(self.sampler, n, kind) for n in row_counts for kind in SAMPLERS),
            *(partial(self.scorer, length) for length in lengths),
        ]

    def forward(self, shape: BatchShape) -> jax.stages.Compiled:
        """(params, kv_cache, last_tokens, packed, old) -> (logits, hidden or None, kv_cache).

        `old` are logits of an earlier step of as many rows, donated for their memory: a CUDA graph
        whose results lie where they lay before need not be changed, which would be more than half
        of the host's time for this call.
        """
        return self._get(("forward", shape), partial(self.forward_program, shape))

    def sampler(self, num_rows: int, kind: Sampler) -> jax.stages.Compiled:
        """(logits, last_tokens, packed) -> (tokens, last_tokens) for all but full.

        full: (..., counts, edits, masks) -> (tokens, top, last_tokens, counts).
        """
        return self._get((kind, num_rows), partial(self._sampler_program, num_rows, kind))

    def scorer(self, num_tokens: int) -> jax.stages.Compiled:
        """(params, hidden, target_ids) -> scores of the targets."""
        return self._get(("score", num_tokens), partial(self._scorer_program, num_tokens))

    def abstract_logits(self, num_rows: int) -> Logits:
        """Shapes of what a forward pass of so many rows gives."""
        shape = (num_rows, self.state.counts.shape[1])
        return jax.eval_shape(
            lambda: Logits(jnp.zeros(shape, self.model.dtype), jnp.zeros(num_rows, jnp.float32))
        )

    @property
    def num_mask_words(self) -> int:
        """Words in a row of token masks."""
        return -(-self.state.counts.shape[1] // 32)

    def _get(self, key: tuple[Any, ...], make: Callable[[], Program]) -> jax.stages.Compiled:
        if (found := self._compiled.get(key)) is None:
            if self._kept is None:
                found = make().compile()
            else:
                found = self._kept.get(f"{self.model.describe()} {key!r}", make())
            self._compiled[key] = found
        return found

    def forward_program(self, shape: BatchShape) -> Program:
        """The forward pass of one shape, neither traced nor compiled; the cache is donated."""
        model, is_mixed = self.model, shape.num_tokens > shape.num_seqs

        def forward(
            params: tuple[Array, ...],
            kv_cache: KVCache,
            last_tokens: Int[Array, " rows"],
            packed: Int[Array, " words"],
            _: Logits,
        ) -> tuple[Logits, Array | None, KVCache]:
            batch = unpack(packed, shape)
            unread = last_tokens.at[batch.token_sources].get(mode="fill", fill_value=0)
            is_read = batch.token_sources == NONE
            token_ids = jnp.where(is_read, batch.token_ids, unread)
            batch = replace(batch, token_ids=token_ids)
            llama, hidden, kv_cache = model.forward(params, kv_cache, batch)
            scores = llama.logits(hidden[batch.sample_rows], model.implementation)
            logits = Logits(scores, log_total(scores.astype(jnp.float32)))
            return logits, hidden if is_mixed else None, kv_cache

        packed, logits = _words(packed_sizes(shape)[0]), self.abstract_logits(shape.num_seqs)
        state, quantization = self.state, model.config.quantization
        return Program(
            step=forward,
            arguments=(model.abstract_params, state.kv_cache, state.last_tokens, packed, logits),
            result=(logits, 0 if is_mixed else None, state.kv_cache),
            donated=(1, 4),
            keeps_unused=True,
            options=forward_options(shape, quant_type=quantization.kind if quantization else None),
        )

    def _sampler_program(self, num_rows: int, kind: Sampler) -> Program:
        shape = BatchShape(num_tokens=num_rows, num_seqs=num_rows, max_pages=1)
        logits, packed = self.abstract_logits(num_rows), _words(packed_sizes(shape)[1])
        args = (logits, self.state.last_tokens, packed)
        if kind != "full":
            step = partial(_choose, _SIMPLE_SAMPLERS[kind])
            return Program(step=step, arguments=args, result=(0, 0), donated=(1,))
        edits = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), empty_edits(num_rows)
        )
        masks = jax.ShapeDtypeStruct((num_rows, self.num_mask_words), jnp.int32)
        return Program(
            step=_choose_fully,
            arguments=(*args, self.state.counts, edits, masks),
            result=(0, 0, 0, 0),
            donated=(1, 3),
        )

    def _scorer_program(self, num_tokens: int) -> Program:
        model = self.model

        def score(params: tuple[Array, ...], hidden: Array, target_ids: Array) -> Array:
            head = partial(model.merge(params)[0].logits, implementation=model.implementation)
            scores = score_prompt(head, hidden, target_ids)
            logprobs, *top = as_bits(scores)
            return jnp.concatenate([logprobs[:, None], *top], axis=1)

        hidden = jax.ShapeDtypeStruct((num_tokens, model.config.hidden_size), model.dtype)
        arguments = (model.abstract_params, hidden, _words(num_tokens))
        return Program(step=score, arguments=arguments, result=0)


def choose_sampler(batch: Batch) -> Sampler:
    """The cheapest sampler that does what the rows of a host batch ask."""
    rows: SamplingBatch = batch.sampling
    if batch.edits is not None or batch.masks is not None or _any_differs(rows, _RARE):
        return "full"
    if not (rows.temperature > 0.0).any():
        return "greedy"
    return "filtered" if _any_differs(rows, _FILTERS) else "random"


# Neutral values: of what only `sample` does, and of what limits a draw.
_RARE = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "num_logprobs": 0.0, "processed": 0.0, "typical_p": 1.0,
}  # fmt: skip
_FILTERS = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0}
_SIMPLE_SAMPLERS: dict[Sampler, Callable[[Logits, SamplingBatch], SampledTokens]] = {
    "greedy": lambda logits, _: greedy(logits), "random": draw, "filtered": draw_filtered,
}  # fmt: skip


def _any_differs(rows: SamplingBatch, neutral: dict[str, float]) -> bool:
    return any((getattr(rows, name) != value).any() for name, value in neutral.items())


def _words(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.int32)


def _choose(
    sampler: Callable[[Logits, SamplingBatch], SampledTokens],
    logits: Logits,
    last_tokens: Int[Array, " rows"],
    packed: Int[Array, " words"],
) -> tuple[Array, Array]:
    sampling = unpack_sampling(packed, logits.total.shape[0])
    return _keep(sampler(logits, sampling), last_tokens, sampling)


def _choose_fully(
    logits: Logits,
    last_tokens: Int[Array, " rows"],
    packed: Int[Array, " words"],
    counts: Counts,
    edits: TokenEdits,
    masks: Int[Array, "R W"],
) -> tuple[Array, Array, Array, Counts]:
    sampling = unpack_sampling(packed, logits.total.shape[0])
    sampled = sample(logits, sampling, edits, counts, masks)
    counts = count_sampled(counts, sampling.count_rows, sampled.token_ids)
    _, *top = as_bits(sampled.scores)
    tokens, last_tokens = _keep(sampled, last_tokens, sampling)
    return tokens, jnp.concatenate(top, axis=1), last_tokens, counts


def _keep(
    sampled: SampledTokens, last_tokens: Int[Array, " rows"], sampling: SamplingBatch
) -> tuple[Array, Array]:
    """Tokens and the bits of their log-probabilities for the host; tokens for the next step."""
    logprobs = as_bits(sampled.scores)[0]
    last_tokens = last_tokens.at[sampling.token_rows].set(sampled.token_ids, mode="drop")
    return jnp.stack([sampled.token_ids, logprobs]), last_tokens

"""The one table between Hugging Face tensor names and ours, for the whole LLaMA family.

Every target is made of one or more source tensors, joined along their output dimension; matrices
are transposed to [in, out]. Whatever does not match in either direction is reported, all at once.
Knows no file format. Used by `load` and `convert`.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from swiftjax.converters.source import CheckpointSource
from swiftjax.errors import CheckpointError
from swiftjax.model_config import ModelConfig

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Computed from the configuration, yet stored by old exporters.
IGNORED_SUFFIX = "rotary_emb.inv_freq"


class Rule(NamedTuple):
    """One of our parameters: its source tensors with their shapes, and whether to transpose."""

    target: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    transpose: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the target."""
        rows = sum(shape[0] for _, shape in self.sources)
        rest = self.sources[0][1][1:]
        return (*rest, rows) if self.transpose else (rows, *rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """What to read for each parameter, after the checkpoint was found to match the model.

    `config.tie_word_embeddings` says what the file holds, whatever config.json claims.
    """

    config: ModelConfig
    rules: tuple[Rule, ...]


def plan_load(source: CheckpointSource, config: ModelConfig) -> LoadPlan:
    """Match a checkpoint's tensors with a model.

    Raises CheckpointError listing every missing, unexpected and misshapen tensor.
    """
    check_num_layers(source, config)
    config = replace(config, tie_word_embeddings=_is_tied(source, config))
    rules = tuple(model_rules(config))
    problems = _mismatches(source, rules)
    if problems:
        raise CheckpointError(
            f"{source.path} does not fit its configuration:\n" + "\n".join(problems)
        )
    return LoadPlan(config=config, rules=rules)


def check_num_layers(source: CheckpointSource, config: ModelConfig) -> None:
    """A guard for the table below: a broken config.json may ask for a billion layers."""
    if config.num_layers > len(source.tensors):
        raise CheckpointError(
            f"{source.path}: the configuration has {config.num_layers} layers; the checkpoint "
            f"holds only {len(source.tensors)} tensors"
        )


def model_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the table for one model, in the order in which the model computes."""
    vocabulary = (config.vocab_size, config.hidden_size)
    norm = (config.hidden_size,)
    yield Rule("embed.embedding", ((EMBEDDING, vocabulary),))
    for layer in range(config.num_layers):
        yield from _layer_rules(config, f"layers.{layer}", f"model.layers.{layer}")
    yield Rule("norm.scale", (("model.norm.weight", norm),))
    if not config.tie_word_embeddings:
        yield Rule("head.kernel", ((HEAD, vocabulary),), transpose=True)


def _layer_rules(config: ModelConfig, ours: str, theirs: str) -> Iterator[Rule]:
    model, mlp = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    attention = f"{theirs}.self_attn"
    qkv = tuple(
        (f"{attention}.{name}_proj", rows) for name, rows in (("q", query), ("k", key), ("v", key))
    )
    gate_up = ((f"{theirs}.mlp.gate_proj", mlp), (f"{theirs}.mlp.up_proj", mlp))
    output = ((f"{attention}.o_proj", model),)
    down = ((f"{theirs}.mlp.down_proj", model),)
    yield Rule(f"{ours}.attention_norm.scale", ((f"{theirs}.input_layernorm.weight", (model,)),))
    yield from _linear(f"{ours}.attention.qkv", qkv, model, config.qkv_bias)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            scale = (f"{attention}.{name}.weight", (config.head_dim,))
            yield Rule(f"{ours}.attention.{name}.scale", (scale,))
    yield from _linear(f"{ours}.attention.output", output, query, config.output_bias)
    mlp_norm = (f"{theirs}.post_attention_layernorm.weight", (model,))
    yield Rule(f"{ours}.mlp_norm.scale", (mlp_norm,))
    yield from _linear(f"{ours}.mlp.gate_up", gate_up, model, config.mlp_bias)
    yield from _linear(f"{ours}.mlp.down", down, mlp, config.mlp_bias)


def _linear(
    target: str, parts: tuple[tuple[str, int], ...], width: int, bias: bool
) -> Iterator[Rule]:
    """Rules of one matrix [width, sum of parts] and its bias; parts are (name, output width)."""
    kernels = tuple((f"{name}.weight", (rows, width)) for name, rows in parts)
    yield Rule(f"{target}.kernel", kernels, transpose=True)
    if bias:
        yield Rule(f"{target}.bias", tuple((f"{name}.bias", (rows,)) for name, rows in parts))


def read_rule(source: CheckpointSource, rule: Rule, dtype: np.dtype[Any]) -> np.ndarray:
    """Read, join, transpose and cast the tensors of one parameter.

    Raises CheckpointError naming the tensor when the cast would turn a finite value into infinity.
    """
    out = np.empty(rule.shape, dtype)
    first = 0
    for name, shape in rule.sources:
        part = cast_finite(source.read(name), dtype, f"{source.path}: {source.label(name)}")
        place = slice(first, first + shape[0])
        if rule.transpose:
            _transpose_into(out[:, place], part)
        else:
            out[place] = part
        first += shape[0]
    return out


def cast_finite(values: np.ndarray, dtype: np.dtype[Any], where: str) -> np.ndarray:
    """Cast to a float type, refusing a cast that makes an infinity (70000 in float16)."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    limit = float(ml_dtypes.finfo(dtype).max)
    # The two fast passes over the source spare most tensors the slow search below.
    if limit >= float(ml_dtypes.finfo(values.dtype).max) or values.size == 0:
        return cast
    if -limit <= float(values.min()) and float(values.max()) <= limit:
        return cast
    made = np.isinf(cast) & np.isfinite(values)
    if made.any():
        raise CheckpointError(
            f"{where} holds {values[made].flat[0]}, which {dtype.name} cannot hold: load it as "
            "bfloat16 or float32"
        )
    return cast


def _transpose_into(out: np.ndarray, matrix: np.ndarray) -> None:
    """Write a matrix's transpose in square tiles: a plain strided copy misses the cache."""
    if out.dtype.itemsize == 2:  # plain integers copy faster than bfloat16
        out, matrix = out.view(np.uint16), matrix.view(np.uint16)
    tile = 256
    for row in range(0, matrix.shape[0], tile):
        for column in range(0, matrix.shape[1], tile):
            block = matrix[row : row + tile, column : column + tile]
            out[column : column + tile, row : row + tile] = block.T


def _is_tied(source: CheckpointSource, config: ModelConfig) -> bool:
    """Decide tying by what the file holds; a flag that contradicts it is only warned about."""
    flag = source.config.get("tie_word_embeddings")
    if HEAD not in source.tensors:
        if flag is False:
            logger.warning(
                "%s says tie_word_embeddings is false but holds no %s: the embedding is used as "
                "the head",
                source.path,
                source.label(HEAD),
            )
        return True
    if not config.tie_word_embeddings:
        return False
    if EMBEDDING in source.tensors and _equal(source, HEAD, EMBEDDING):
        return True
    logger.warning(
        "%s says tie_word_embeddings is true but holds a different %s, which is used",
        source.path,
        source.label(HEAD),
    )
    return False


def _equal(source: CheckpointSource, left: str, right: str) -> bool:
    if source.tensors[left] != source.tensors[right]:
        return False
    return bool(np.array_equal(source.read(left).view(np.uint8), source.read(right).view(np.uint8)))


def _mismatches(source: CheckpointSource, rules: tuple[Rule, ...]) -> list[str]:
    expected = {name: shape for rule in rules for name, shape in rule.sources}
    problems = [
        f"missing: {source.label(name)} {list(shape)}"
        for name, shape in expected.items()
        if name not in source.tensors
    ]
    for name, info in source.tensors.items():
        if name not in expected:
            if not name.endswith(IGNORED_SUFFIX) and name != HEAD:
                problems.append(f"unexpected: {source.label(name)} {list(info.shape)}")
        elif info.shape != expected[name]:
            problems.append(
                f"misshapen: {source.label(name)} is {list(info.shape)}, "
                f"the configuration asks for {list(expected[name])}"
            )
        elif info.dtype.kind not in "fV":
            problems.append(f"not a float: {source.label(name)} has dtype {info.dtype.name}")
    return problems

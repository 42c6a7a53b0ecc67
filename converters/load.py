"""Load any checkpoint onto the default device: a Hugging Face directory, GGUF or our own format.

One tensor at a time, so the host never holds much more than the model itself. Decides the dtype;
leaves matching to `hf_llama`, file formats to the sources and fewer bits to `quantize`. Called by
`api` and `convert`.
"""

import math
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from swiftjax.converters.calibration import Recipe
from swiftjax.converters.foreign import refuse_foreign
from swiftjax.converters.gguf_source import GgufSource
from swiftjax.converters.hf_llama import (
    LoadPlan,
    Rule,
    cast_finite,
    check_num_layers,
    model_rules,
    plan_load,
    read_rule,
)
from swiftjax.converters.hf_source import HfConfigs, HfSource, read_configs
from swiftjax.converters.packed.method import QUANTIZATION_KEYS, packed_method
from swiftjax.converters.packed.source import KERNEL, PackedSource
from swiftjax.converters.quantize import NEAREST, check_untouched, quantized, with_quantization
from swiftjax.converters.source import CheckpointSource
from swiftjax.errors import CheckpointError
from swiftjax.model.ahead import ahead
from swiftjax.model.checkpoint import NativeCheckpoint, Progress, is_native
from swiftjax.model.checkpoint_writer import Tensors
from swiftjax.model.config_json import read_model_config
from swiftjax.model.params import abstract_params, weight_bytes
from swiftjax.model_config import Dtype, ModelConfig
from swiftjax.quantization import Quantization
from swiftjax.tokenizer_files import TokenizerFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """A model ready to run: `config` holds the resolved dtype and what the file says of tying."""

    config: ModelConfig
    params: dict[str, jax.Array]
    tokenizer_files: TokenizerFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenCheckpoint:
    """A checkpoint that was found whole and fitting.

    `tensors` reads it one by one, without those of the given names that nobody waits for.
    """

    config: ModelConfig
    num_params: int  # elements, not tensors
    num_bytes: int  # as `tensors` gives them
    tensors: Tensors
    tokenizer_files: TokenizerFiles


def load_checkpoint(
    path: Path,
    *,
    dtype: Dtype | None,
    quantization: Quantization | None = None,
    progress: Progress | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint onto the default device; `progress` is told (bytes done, bytes in all).

    With a `quantization` the projections are rounded on the way. Without a dtype: the one
    config.json names, else the one the weights are stored in, else (GGUF) float32 on a CPU and
    bfloat16 on an accelerator. Raises CheckpointError for whatever is wrong with the files,
    UnsupportedError for a model that cannot be computed and InvalidRequestError for a quantisation
    of what is quantised otherwise already.
    """
    opened = open_checkpoint(path, dtype=dtype, quantization=quantization)
    return LoadedCheckpoint(
        config=opened.config,
        params=load_params(opened, progress),
        tokenizer_files=opened.tokenizer_files,
    )


def load_params(opened: OpenCheckpoint, progress: Progress | None = None) -> dict[str, jax.Array]:
    """Put the tensors of an open checkpoint on the default device, once."""
    params: dict[str, jax.Array] = {}
    done = 0
    for name, values in opened.tensors(frozenset()):
        # Waiting bounds the host memory: a copy still under way holds its source.
        params[name] = jax.block_until_ready(jax.device_put(values))
        done += values.nbytes
        if progress is not None:
            progress(done, opened.num_bytes)
    return params


def open_checkpoint(
    path: Path,
    *,
    dtype: Dtype | None,
    quantization: Quantization | None = None,
    recipe: Recipe = NEAREST,
) -> OpenCheckpoint:
    """Open and check a checkpoint of any format without reading its tensors."""
    if not os.path.exists(path):  # unlike Path.exists, says no to a name too long to be one
        raise CheckpointError(
            f"{path} does not exist; give a Hugging Face directory, a .gguf file or a directory "
            "written by `swiftjax convert`"
        )
    opened = _open_native(path, dtype) if is_native(path) else _open_foreign(path, dtype)
    config = with_quantization(opened.config, quantization)
    if config == opened.config:
        check_untouched(config, quantization, recipe)
        return opened
    assert config.quantization is not None
    recipe.check(config.quantization)
    return replace(
        opened,
        config=config,
        num_bytes=weight_bytes(config),
        tensors=partial(_read_quantized, opened, config, recipe),
    )


def _open_foreign(path: Path, dtype: Dtype | None) -> OpenCheckpoint:
    source, config = _open_source(path)
    plan = plan_load(source, replace(config, dtype=_resolve_dtype(dtype, config, source)))
    return OpenCheckpoint(
        config=plan.config,
        num_params=sum(int(np.prod(rule.shape)) for rule in plan.rules),
        num_bytes=weight_bytes(plan.config),
        tensors=partial(_read_plan, source, plan),
        tokenizer_files=source.tokenizer_files(),
    )


def _open_source(path: Path) -> tuple[CheckpointSource, ModelConfig]:
    if not path.is_dir():
        refuse_foreign(path)
        source = GgufSource(path)
        return source, read_model_config(path, source.config, source.generation)
    configs = read_configs(path)
    method = packed_method(path, configs.config)
    if method is not None:
        plain = {k: v for k, v in configs.config.items() if k not in QUANTIZATION_KEYS}
        configs = HfConfigs(plain, configs.generation)
    # That a model is none of ours is said before one of its files is missed.
    config = read_model_config(path, *configs)
    source = HfSource(path, configs)
    if method is None:
        return source, config
    check_num_layers(source, config)
    rules = tuple(model_rules(replace(config, tie_word_embeddings=False)))
    packed = PackedSource(source, method, rules)
    return packed, replace(config, quantization=packed.quantization)


def _read_plan(
    source: CheckpointSource, plan: LoadPlan, done: Set[str]
) -> Iterator[tuple[str, np.ndarray]]:
    whole = _whole_kernels(done, plan.config)
    itemsize = _numpy_dtype(plan.config).itemsize
    jobs = (
        (2 * math.prod(rule.shape) * itemsize, partial(_read_rule, source, plan.config, rule))
        for rule in plan.rules
        if rule.target not in whole
    )
    for tensors in ahead(jobs):
        yield from tensors


def _read_rule(
    source: CheckpointSource, config: ModelConfig, rule: Rule
) -> list[tuple[str, np.ndarray]]:
    form = config.weight_format(rule.target.removesuffix(KERNEL))
    if isinstance(source, PackedSource) and form and rule.target.endswith(KERNEL):
        return list(source.read_packed(rule, form))
    return [(rule.target, read_rule(source, rule, _numpy_dtype(config)))]


def _read_quantized(
    opened: OpenCheckpoint, config: ModelConfig, recipe: Recipe, done: Set[str]
) -> Iterator[tuple[str, np.ndarray]]:
    # A text runs through all layers anyhow, so all are read again.
    needless = frozenset() if recipe.texts else _whole_kernels(done, config)
    return quantized(opened.tensors(needless), config, recipe)


def _whole_kernels(done: Set[str], config: ModelConfig) -> Set[str]:
    """Those of the given parameters whose scales and the like are among them too."""
    if not done:
        return done
    lacking = abstract_params(config, jax.numpy.dtype(config.dtype or "float32")).keys() - done
    return {name for name in done if not any(other.startswith(f"{name}_") for other in lacking)}


def _open_native(path: Path, dtype: Dtype | None) -> OpenCheckpoint:
    native = NativeCheckpoint(path)
    config = native.config if dtype is None else replace(native.config, dtype=dtype)
    # Only what is stored in the model's dtype changes with it: codes and scales do not.
    targets = abstract_params(config, jax.numpy.dtype(config.dtype or "float32"))
    return OpenCheckpoint(
        config=config,
        num_params=native.num_params,
        num_bytes=weight_bytes(config),
        tensors=lambda done: (
            (name, cast_finite(values, np.dtype(targets[name].dtype), f"{path}: {name}"))
            for name, values in native.read(done)
        ),
        tokenizer_files=native.tokenizer_files(),
    )


def _resolve_dtype(asked: Dtype | None, config: ModelConfig, source: CheckpointSource) -> Dtype:
    fallback: Dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return asked or config.dtype or source.file_dtype or fallback


def _numpy_dtype(config: ModelConfig) -> np.dtype[np.generic]:
    assert config.dtype is not None, "open_checkpoint resolves the dtype"
    return np.dtype(jax.numpy.dtype(config.dtype))

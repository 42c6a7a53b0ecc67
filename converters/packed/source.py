"""A quantised checkpoint seen as a plain one, and the codes of those matrices that ours can hold.

Every quantised module shows a dequantised `weight`, so names and shapes are matched as always.
A parameter made of several modules is held only where all of them are held alike; a checkpoint has
one format, that of most weights, and everything else is dequantised. Used by `load`.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from swiftjax.converters.hf_llama import Rule
from swiftjax.converters.packed.coded import Holding
from swiftjax.converters.packed.method import PackedMethod
from swiftjax.converters.source import CheckpointSource, TensorInfo
from swiftjax.model_config import Dtype
from swiftjax.quantization import Quantization, QuantType, WeightFormat
from swiftjax.tokenizer_files import TokenizerFiles

logger = logging.getLogger(__name__)

WEIGHT = ".weight"
KERNEL = ".kernel"
DEFAULT_GROUP_SIZE = 128  # of formats without groups, where it means nothing
# Scales of a KV cache in 8 bits, which the engine finds itself.
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")


class PackedSource:
    """Implements CheckpointSource over one; `rules` are those of the model, a head of its own too.

    `quantization` is the format of the whole checkpoint. Raises CheckpointError for broken modules.
    """

    def __init__(
        self, source: CheckpointSource, method: PackedMethod, rules: Sequence[Rule]
    ) -> None:
        self._source, self._method = source, method
        self._holdings = {
            module: method.holding(source, module) for module in method.modules(source)
        }
        expected = {name for rule in rules for name, _ in rule.sources}
        self.tensors: Mapping[str, TensorInfo] = self._visible(expected)
        kernels = {
            rule.target.removesuffix(KERNEL): rule for rule in rules if rule.target.endswith(KERNEL)
        }
        self.quantization = self._choose(kernels)

    @property
    def path(self) -> Path:
        """The directory."""
        return self._source.path

    @property
    def config(self) -> Mapping[str, Any]:
        """The contents of config.json."""
        return self._source.config

    @property
    def generation(self) -> Mapping[str, Any]:
        """The contents of generation_config.json."""
        return self._source.generation

    @property
    def file_dtype(self) -> Dtype | None:
        """What the source says."""
        return self._source.file_dtype

    def label(self, name: str) -> str:
        """The name itself."""
        return name

    def tokenizer_files(self) -> TokenizerFiles:
        """Read the tokenizer's files."""
        return self._source.tokenizer_files()

    def read(self, name: str) -> np.ndarray:
        """Read one tensor, dequantised to float32 if it is a quantised module's weight."""
        module = name.removesuffix(WEIGHT)
        if name.endswith(WEIGHT) and module in self._holdings:
            return self._method.read(self._source, module).dequantize()
        return self._source.read(name)

    def read_packed(self, rule: Rule, form: WeightFormat) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the parameters that hold one target's codes, its modules joined by outputs."""
        modules = _modules(rule)
        order = self._holdings[modules[0]].order
        parts = [self._method.read(self._source, name).packed(form, order) for name in modules]
        for suffix in parts[0]:
            arrays = [part[suffix] for part in parts]
            if suffix == "kernel_order":
                joined = arrays[0]  # is the same for all
            else:
                axis = 1 if form.kind == "int4" and suffix != "kernel" else 0
                joined = np.concatenate(arrays, axis=axis)
            yield rule.target.removesuffix("kernel") + suffix, joined

    def _visible(self, expected: Set[str]) -> dict[str, TensorInfo]:
        visible = {}
        for name, info in self._source.tensors.items():
            module, _, part = name.rpartition(".")
            is_part = module in self._holdings and part in self._method.parts
            if is_part or name.endswith(CACHE_SCALES):
                continue
            # Some writers give every module a bias, of zeros where the model has none.
            is_extra = part == "bias" and module in self._holdings and name not in expected
            if not is_extra or self._source.read(name).any():
                visible[name] = info
        for module, holding in self._holdings.items():
            visible[module + WEIGHT] = TensorInfo(holding.shape, np.dtype(np.float32))
        return visible

    def _choose(self, kernels: Mapping[str, Rule]) -> Quantization | None:
        alike = {name: self._holdings_of(rule) for name, rule in kernels.items()}
        sizes: Counter[QuantType] = Counter()
        for name, held in alike.items():
            if held and held[0].kind:
                sizes[held[0].kind] += math.prod(kernels[name].shape)
        kind = max(sizes, key=lambda kind: sizes[kind], default=None)
        chosen = {name: held for name, held in alike.items() if held and held[0].kind == kind}
        self._tell(kernels, chosen.keys(), f"other formats than {kind}")
        if kind is None:
            return None
        every = [holding for held in chosen.values() for holding in held]
        return Quantization(
            kind=kind,
            # Groups can be cut up without loss, so the smallest does for all.
            group_size=min(holding.group_size for holding in every) or DEFAULT_GROUP_SIZE,
            keep=tuple(name for name in kernels if name not in chosen),
            act_order=any(holding.order is not None for holding in every),
        )

    def _holdings_of(self, rule: Rule) -> list[Holding]:
        """How the modules of one parameter are held; nothing if not all are, and alike."""
        found = [self._holdings.get(module) for module in _modules(rule)]
        held = [holding for holding in found if holding is not None and holding.kind]
        is_alike = all(
            holding.kind == held[0].kind and _equal(holding.order, held[0].order)
            for holding in held
        )
        return held if is_alike and len(held) == len(found) else []

    def _tell(self, kernels: Mapping[str, Rule], chosen: Set[str], rest: str) -> None:
        """Say in the log what was quantised and does not stay so, and why."""
        reasons: Counter[str] = Counter()
        for name, rule in kernels.items():
            found = [self._holdings[x] for x in _modules(rule) if x in self._holdings]
            if found and name not in chosen:
                reason = next((holding.reason for holding in found if holding.reason), "")
                other = rest if self._holdings_of(rule) else "parts quantised differently"
                reasons[reason or other] += 1
        for reason, count in reasons.items():
            logger.warning(
                "%s: %d of %d projections are dequantised, since no format here holds them: %s",
                self.path,
                count,
                len(kernels),
                reason,
            )


def _equal(left: np.ndarray | None, right: np.ndarray | None) -> bool:
    return left is right or (left is not None and right is not None and np.array_equal(left, right))


def _modules(rule: Rule) -> list[str]:
    return [name.removesuffix(WEIGHT) for name, _ in rule.sources]

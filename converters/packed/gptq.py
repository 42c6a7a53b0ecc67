"""GPTQ: qweight [K*bits/32, N], qzeros [G, N*bits/32], scales [G, N], g_idx [K].

Version 1 stores zero points less one, word by word; version 2 as they are. Some tools write one
under the other's label, which shows where the zero points are known: symmetric ones.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from swiftjax.converters.packed.coded import (
    CodedMatrix,
    Holding,
    consecutive_groups,
    int4_holding,
)
from swiftjax.converters.packed.parts import (
    Part,
    check_parts,
    count_groups,
    matrix_shape,
    modules_with,
    plain,
)
from swiftjax.converters.packed.words import unpack_rows
from swiftjax.converters.source import CheckpointSource
from swiftjax.errors import CheckpointError, UnsupportedError

logger = logging.getLogger(__name__)

FORMATS = ("gptq", "gptq_v2")
ONES = {4: 0x11111111, 8: 0x01010101}  # one in every code of a word


class Gptq:
    """Implements PackedMethod. Raises UnsupportedError for a variant that is not read."""

    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits = plain(config.get("bits"), int)
        self.group_size = plain(config.get("group_size"), int, -1)
        self.is_symmetric = plain(config.get("sym"), bool, False)
        self.format = config.get("checkpoint_format") or "gptq"
        self._has_warned = False
        if self.bits not in ONES:
            raise UnsupportedError(f"gptq with {self.bits!r:.80} bits is not read; 4 and 8 are")
        if self.format not in FORMATS:
            raise UnsupportedError(
                f"gptq in checkpoint_format {self.format!r:.80} is not read; "
                f"{' and '.join(FORMATS)} are"
            )
        # Rules by module; those that begin with a minus only leave modules out.
        rules = plain(config.get("dynamic"), dict, {})
        if any(not str(rule).startswith("-:") for rule in rules):
            raise UnsupportedError("gptq with settings that differ by module (dynamic) is not read")

    def modules(self, source: CheckpointSource) -> Iterator[str]:
        """Names of the quantised modules."""
        return modules_with(source, "qweight")

    def holding(self, source: CheckpointSource, module: str) -> Holding:
        """Read g_idx and check all shapes."""
        rows, num_outputs = matrix_shape(source, f"{module}.qweight")
        per_word = 32 // self.bits
        num_inputs = rows * per_word
        num_groups = count_groups(num_inputs, self.group_size)
        expected = {
            "qweight": Part((rows, num_outputs), "i"),
            "qzeros": Part((num_groups, -(-num_outputs // per_word)), "i"),
            "scales": Part((num_groups, num_outputs)),
        }
        if f"{module}.g_idx" in source.tensors:
            expected["g_idx"] = Part((num_inputs,), "i")
        given = f"{self.bits} bits and groups of {self.group_size}"
        check_parts(source, module, expected, given)
        shape = (num_outputs, num_inputs)
        if self.bits == 4:
            return int4_holding(shape, self.group_size, self._groups(source, module))
        if num_groups > 1:
            return Holding(shape=shape, kind=None, reason="8 bits in groups")
        if not self.is_symmetric:
            return Holding(shape=shape, kind=None, reason="8 bits with zero points")
        return Holding(shape=shape, kind="int8")

    def read(self, source: CheckpointSource, module: str) -> CodedMatrix:
        """Read one matrix. Raises CheckpointError for zero points that fit no version."""
        words = source.read(f"{module}.qweight")
        codes = unpack_rows(np.ascontiguousarray(words.T), self.bits)
        scale = source.read(f"{module}.scales").astype(np.float32)
        groups = self._groups(source, module)
        if groups is None:
            groups = consecutive_groups(codes.shape[1], len(scale), self.group_size)
        zero = self._zeros(source, module, scale.shape[1])
        return CodedMatrix(codes=codes, scale=scale, zero=zero, groups=groups)

    def _groups(self, source: CheckpointSource, module: str) -> Int32[np.ndarray, " K"] | None:
        if f"{module}.g_idx" not in source.tensors:
            return None
        groups = source.read(f"{module}.g_idx").astype(np.int32)
        num_groups = source.tensors[f"{module}.scales"].shape[0]
        if not 0 <= groups.min() <= groups.max() < num_groups:
            raise CheckpointError(
                f"{source.path}: {module}.g_idx names groups {groups.min()} to {groups.max()}; "
                f"there are {num_groups}"
            )
        # Some writers leave zeros where groups are neighbours.
        return groups if groups.any() else None

    def _zeros(
        self, source: CheckpointSource, module: str, num_outputs: int
    ) -> UInt8[np.ndarray, "G N"]:
        words = source.read(f"{module}.qzeros")
        # Word by word, with the carry: so the writers subtract it.
        shifted = (words.view(np.uint32) + np.uint32(ONES[self.bits])).view(np.int32)
        both = [unpack_rows(x, self.bits)[:, :num_outputs] for x in (shifted, words)]
        labelled, other = both if self.format == "gptq" else reversed(both)
        middle = 1 << (self.bits - 1)
        if not self.is_symmetric or (labelled == middle).all():
            return labelled
        if not (other == middle).all():
            raise CheckpointError(
                f"{source.path}: {module}.qzeros are not all {middle}, which symmetric weights "
                "need in either version: the file is broken, or sym in its configuration is wrong"
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s says %s but stores the zero points of the other version, and is read so",
                source.path,
                self.format,
            )
        return other

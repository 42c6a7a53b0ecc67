"""AWQ in its GEMM layout: qweight [K, N/8], qzeros [G, N/8], scales [G, N], 4 bits.

Eight outputs share a word in the order of `words.AWQ_ORDER`; zero points are stored as they are.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

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
from swiftjax.converters.packed.words import AWQ_ORDER, unpack_awq
from swiftjax.converters.source import CheckpointSource
from swiftjax.errors import UnsupportedError


class Awq:
    """Implements PackedMethod. Raises UnsupportedError for a variant that is not read."""

    parts = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits = config.get("bits", config.get("w_bit"))
        self.group_size = plain(config.get("group_size", config.get("q_group_size")), int, 128)
        version = str(config.get("version") or "gemm").lower()
        if bits != 4:
            raise UnsupportedError(f"awq with {bits!r:.80} bits is not read; 4 bits are")
        if version != "gemm":
            raise UnsupportedError(f"awq in version {version!r:.80} is not read; gemm is")

    def modules(self, source: CheckpointSource) -> Iterator[str]:
        """Names of the quantised modules."""
        return modules_with(source, "qweight")

    def holding(self, source: CheckpointSource, module: str) -> Holding:
        """Check all shapes."""
        num_inputs, num_words = matrix_shape(source, f"{module}.qweight")
        num_outputs = num_words * len(AWQ_ORDER)
        num_groups = count_groups(num_inputs, self.group_size)
        expected = {
            "qweight": Part((num_inputs, num_words), "i"),
            "qzeros": Part((num_groups, num_words), "i"),
            "scales": Part((num_groups, num_outputs)),
        }
        check_parts(source, module, expected, f"4 bits and groups of {self.group_size}")
        return int4_holding((num_outputs, num_inputs), self.group_size, None)

    def read(self, source: CheckpointSource, module: str) -> CodedMatrix:
        """Read one matrix."""
        codes = unpack_awq(source.read(f"{module}.qweight"))
        scale = source.read(f"{module}.scales").astype(np.float32)
        return CodedMatrix(
            codes=np.ascontiguousarray(codes.T),
            scale=scale,
            zero=unpack_awq(source.read(f"{module}.qzeros")),
            groups=consecutive_groups(len(codes), len(scale), self.group_size),
        )

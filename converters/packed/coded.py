"""One quantised matrix of somebody else in one form, whatever the file's, and how ours holds it.

A weight is scale * (code - zero), with a scale and a zero point per output and group of inputs.
Knows no file format. Made by the readers beside it, used by `source`.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8

from swiftjax.kernels import packed_int4
from swiftjax.quantization import GROUP_SIZES, QuantType, WeightFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What is known of a matrix [outputs, inputs] before its codes are read.

    `kind` is the format that holds it without loss, None where there is none: `reason` says why.
    `group_size` (int4) is the largest that holds it; smaller ones of ours do too. `order` lists the
    inputs group by group where groups are no neighbours.
    """

    shape: tuple[int, int]
    kind: QuantType | None
    group_size: int = 0
    order: Int32[np.ndarray, " K"] | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedMatrix:
    """Codes as the file has them, and for every input the row of `scale` and `zero` it uses.

    `zero` None means zero points of 0.
    """

    codes: Shaped[np.ndarray, "N K"]  # uint8, int8 or an 8-bit float
    scale: Float32[np.ndarray, "G N"]
    zero: UInt8[np.ndarray, "G N"] | None
    groups: Int32[np.ndarray, " K"]

    def dequantize(self) -> Float32[np.ndarray, "N K"]:
        """The weights, in float32."""
        values = self.codes.astype(np.float32)
        if self.zero is not None:
            values -= self.zero.astype(np.float32).T[:, self.groups]
        values *= self.scale.T[:, self.groups]
        return values

    def packed(self, form: WeightFormat, order: np.ndarray | None) -> dict[str, np.ndarray]:
        """The arrays of one of our formats, by the suffixes of the parameters' names."""
        if form.kind == "int4":
            return self._packed_int4(form, order)
        codes = self.codes
        if codes.dtype == np.uint8:  # around 128, which `zero` says
            codes = (codes ^ np.uint8(128)).view(np.int8)
        return {"kernel": codes, "kernel_scale": np.ascontiguousarray(self.scale[0])}

    def _packed_int4(self, form: WeightFormat, order: np.ndarray | None) -> dict[str, np.ndarray]:
        assert self.zero is not None, "int4 has zero points"
        if order is None:
            order = np.arange(self.codes.shape[1], dtype=np.int32)
        # One large group is several equal ones of ours.
        groups = self.groups[order][:: form.group_size]
        arrays = {
            "kernel": packed_int4.pack(self.codes[:, order]),
            "kernel_scale": self.scale[groups],
            "kernel_zero": self.zero[groups],
        }
        return {"kernel_order": order, **arrays} if form.act_order else arrays


def consecutive_groups(num_inputs: int, num_groups: int, group_size: int) -> np.ndarray:
    """The group of every input where groups are neighbours; a size below 1 means one group."""
    if group_size < 1:
        return np.zeros(num_inputs, np.int32)
    return np.minimum(np.arange(num_inputs) // group_size, num_groups - 1).astype(np.int32)


def int4_holding(shape: tuple[int, int], group_size: int, groups: np.ndarray | None) -> Holding:
    """How a 4-bit matrix is held; `groups` where the file names the group of every input.

    Our groups are 32, 64 or 128 neighbours; larger ones are cut up and scattered ones reordered.
    """
    num_inputs = shape[1]
    if not 0 < group_size < num_inputs:
        return Holding(shape=shape, kind="int4", group_size=max(GROUP_SIZES))
    sizes = [size for size in GROUP_SIZES if group_size % size == 0]
    if not sizes:
        return Holding(shape=shape, kind=None, reason=f"groups of {group_size} inputs")
    held = Holding(shape=shape, kind="int4", group_size=max(sizes))
    if groups is None or np.array_equal(groups, np.arange(num_inputs) // group_size):
        return held
    order = np.argsort(groups, kind="stable").astype(np.int32)
    if not np.array_equal(groups[order], np.arange(num_inputs) // group_size):
        return Holding(shape=shape, kind=None, reason="groups of unequal sizes")
    return Holding(shape=shape, kind="int4", group_size=max(sizes), order=order)

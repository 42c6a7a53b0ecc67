"""How weights are stored in fewer bits: which projections, in which format.

Plain values without arrays. A ModelConfig carries one; `model/linear.py` gives every format its
parameters, `converters/quantize.py` makes them, `kernels` multiplies by them.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from swiftjax.errors import InvalidRequestError

# int8, int4: weights only. fp8, w8a8: activations too, with a scale per token found on the way.
QuantType = Literal["int8", "int4", "fp8", "w8a8"]
QUANT_TYPES: tuple[QuantType, ...] = get_args(QuantType)
# A group is a whole number of the planes of 16 that share a word, or of words.
GROUP_SIZES = (32, 64, 128)
GROUP_SIZE = 128  # unless asked otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How one projection is stored; `group_size` inputs share a scale (int4 only, else 0).

    With `act_order` the kernel's inputs stand in an order of their own, which is stored beside it.
    With `static` (w8a8) there is one stored scale for all activations instead of one per token.
    """

    kind: QuantType
    group_size: int = 0
    act_order: bool = False
    static: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """The format of all projections save those whose name matches a pattern of `keep`.

    Names are those of the parameters without `.kernel`: `layers.3.mlp.down`, `head`; a star stands
    for any characters. Norms and embeddings are never quantised. `act_order` (int4 only) is what
    GPTQ calls grouping inputs by their importance: groups are no neighbours. `static_activations`
    (w8a8 only) are scaled by numbers that a text gave beforehand. Raises InvalidRequestError for
    a type or group size that does not exist.
    """

    kind: QuantType
    group_size: int = GROUP_SIZE
    keep: tuple[str, ...] = ("head",)
    act_order: bool = False
    static_activations: bool = False

    def __post_init__(self) -> None:
        if self.kind not in QUANT_TYPES:
            raise InvalidRequestError(
                f"quantisation {self.kind!r:.80} is unknown; choose one of {', '.join(QUANT_TYPES)}"
            )
        if self.static_activations and self.kind != "w8a8":
            raise InvalidRequestError(
                f"static activation scales belong to w8a8, not to {self.kind}: leave one out"
            )
        if self.group_size not in GROUP_SIZES:
            raise InvalidRequestError(
                f"group_size is {self.group_size!r:.80}; choose one of "
                f"{', '.join(map(str, GROUP_SIZES))}"
            )

    def format_of(self, name: str) -> WeightFormat | None:
        """The format of one projection; None leaves it in the model's dtype."""
        if any(fnmatchcase(name, pattern) for pattern in self.keep):
            return None
        if self.kind != "int4":
            return WeightFormat(kind=self.kind, static=self.static_activations)
        return WeightFormat(kind="int4", group_size=self.group_size, act_order=self.act_order)

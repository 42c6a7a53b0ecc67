"""Options of `swiftjax convert` that say how weights are rounded, and by which text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from swiftjax.errors import InvalidRequestError
from swiftjax.quantization import Quantization

if TYPE_CHECKING:
    from swiftjax.converters.calibration import Recipe

PIECE = 512  # tokens of a piece of calibration text, or the model's context if that is shorter

MethodName = Literal["rtn", "awq", "gptq"]
RangeName = Literal["dynamic", "kl", "percentile"]
Method = Annotated[
    MethodName,
    typer.Option(help="How weights are rounded; awq and gptq need --calib. docs/quantisation.md."),
]
Symmetric = Annotated[
    bool,
    typer.Option(
        "--symmetric/--asymmetric",
        help="int4: one zero point for all groups, or each its own.",
        show_default="asymmetric",
    ),
]
Calib = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The text to calibrate with: plain, or .jsonl with the field 'text'.",
        show_default="none",
    ),
]
CalibTokens = Annotated[int, typer.Option(help="Read so many tokens of it.")]


ActivationRange = Annotated[
    RangeName,
    typer.Option(
        help="w8a8: a scale for every token, or one for all, which the text of --calib gives."
    ),
]


class Rounding(NamedTuple):
    """What the options say."""

    method: MethodName
    symmetric: bool
    ranges: RangeName
    calib: Path | None
    calib_tokens: int


NEAREST = Rounding("rtn", False, "dynamic", None, 0)


def read_recipe(rounding: Rounding, source: Path, quantization: Quantization | None) -> "Recipe":
    """Check the options against each other and read the text, with the source's tokenizer."""
    from swiftjax.converters.calibration import Recipe
    from swiftjax.converters.load import open_checkpoint
    from swiftjax.engine.tokenizer import Tokenizer
    from swiftjax.evaluation.texts import cut_text, read_text

    if quantization is None and rounding != NEAREST._replace(calib_tokens=rounding.calib_tokens):
        raise InvalidRequestError(
            "--method, --symmetric, --activation-range and --calib say how a model is quantised: "
            "give --quant-type too"
        )
    if rounding.calib is None:
        return Recipe(method=rounding.method, symmetric=rounding.symmetric, ranges=rounding.ranges)
    text = read_text(rounding.calib)
    opened = open_checkpoint(source, dtype=None)
    tokenizer = Tokenizer(opened.tokenizer_files, max_chars=1 << 26)
    length = min(PIECE, opened.config.max_position)
    pieces = cut_text(text, tokenizer, length=length, num_tokens=rounding.calib_tokens)
    return Recipe(
        method=rounding.method, symmetric=rounding.symmetric, ranges=rounding.ranges,
        texts=tuple(pieces),
    )  # fmt: skip

"""`swiftjax convert`: any readable checkpoint into a native one, in fewer bits if asked."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swiftjax.cli.loading import progress
from swiftjax.cli.options import MODEL_HELP, Quiet
from swiftjax.cli.reporting import print_line
from swiftjax.cli.rounding import (
    NEAREST,
    ActivationRange,
    Calib,
    CalibTokens,
    Method,
    RangeName,
    Rounding,
    Symmetric,
    read_recipe,
)
from swiftjax.errors import InvalidRequestError
from swiftjax.model_config import Dtype
from swiftjax.quantization import GROUP_SIZE, Quantization

if TYPE_CHECKING:
    from swiftjax.converters.convert import ConvertReport

ConvertType = Literal["none", "fp16", "bf16", "int8", "int4", "fp8", "w8a8"]
ALIASES: dict[str, Dtype] = {"fp16": "float16", "bf16": "bfloat16"}


def convert(
    src: Annotated[str | None, typer.Argument(metavar="SRC", help=MODEL_HELP)] = None,
    dst: Annotated[
        Path | None, typer.Argument(metavar="DST", help="Directory to write; must not exist yet.")
    ] = None,
    model_path: Annotated[
        str | None,
        typer.Option("--model-path", "--model_path", help="SRC as an option.", show_default="SRC"),
    ] = None,
    output_path: Annotated[
        Path | None,
        typer.Option(
            "--output-path", "--output_path", help="DST as an option.", show_default="DST"
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Type of weights and activations.", show_default="as in SRC; GGUF: float32"
        ),
    ] = None,
    quant_type: Annotated[
        ConvertType,
        typer.Option(
            "--quant-type",
            "--quant_type",
            help="Format of the projections' weights; fp16 and bf16 are other words for --dtype.",
        ),
    ] = "none",
    group_size: Annotated[
        int, typer.Option(help="Inputs that share a scale in int4: 32, 64 or 128.")
    ] = GROUP_SIZE,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Do not quantise projections of this name, e.g. 'layers.0.*' or '*.down'; can be "
            "given several times.",
            show_default="head",
        ),
    ] = None,
    method: Method = "rtn",
    symmetric: Symmetric = False,
    activation_range: ActivationRange = "dynamic",
    calib: Calib = None,
    calib_tokens: CalibTokens = 16384,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a native checkpoint at DST.", show_default="off"),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Convert a checkpoint into SwiftJAX's own format.

    DST appears whole or not at all; a conversion that was killed goes on where it was. No GPU is
    used, save by --calib.
    """
    from swiftjax.converters.demo_model import resolve_model

    source, target = _one("SRC", src, model_path), Path(_one("DST", dst, output_path))
    written = convert_on_cpu(
        resolve_model(str(source)),
        target,
        dtype=_dtype(dtype, quant_type),
        quantization=_quantization(quant_type, group_size, keep, activation_range, symmetric),
        rounding=Rounding(method, symmetric, activation_range, calib, calib_tokens),
        force=force,
        quiet=quiet,
    )
    if not quiet:
        form = written.config.quantization
        print_line(
            f"{written.destination}: {written.config.family}, "
            f"{written.num_params / 1e6:,.1f} million parameters in {written.config.dtype}"
            f"{f' and {form.kind}' if form else ''}, {written.num_bytes / 2**20:,.0f} MiB, "
            f"{written.seconds:.1f} s"
        )


def convert_on_cpu(
    src: Path,
    dst: Path,
    *,
    dtype: Dtype | None,
    quantization: Quantization | None = None,
    rounding: Rounding = NEAREST,
    force: bool,
    quiet: bool,
) -> "ConvertReport":
    """Convert without touching a GPU, whose memory jax would take although no device is needed.

    Only a calibration text needs one, where there is one: the model is run on it.
    """
    import jax

    from swiftjax.converters.convert import convert as convert_checkpoint

    if rounding.calib is None:
        jax.config.update("jax_platforms", "cpu")
    if quantization is not None:
        _check_kept(quantization, src)
    recipe = read_recipe(rounding, src, quantization)
    with progress(f"converting {src.name}", quiet=quiet, in_bytes=True) as report:
        return convert_checkpoint(
            src, dst, dtype=dtype, quantization=quantization, recipe=recipe, force=force,
            progress=report,
        )  # fmt: skip


def _one(name: str, argument: str | Path | None, option: str | Path | None) -> str | Path:
    if argument is not None and option is not None and str(argument) != str(option):
        raise InvalidRequestError(f"{name} is given twice: {argument} and {option}")
    value = argument if argument is not None else option
    if value is None:
        raise typer.BadParameter("it is missing", param_hint=name)
    return value


def _dtype(dtype: Dtype | None, quant_type: ConvertType) -> Dtype | None:
    alias = ALIASES.get(quant_type)
    if dtype is not None and alias is not None and dtype != alias:
        raise InvalidRequestError(
            f"--quant-type {quant_type} means --dtype {alias}, and --dtype is {dtype}: give one"
        )
    return alias or dtype


def _quantization(
    quant_type: ConvertType,
    group_size: int,
    keep: list[str] | None,
    ranges: RangeName,
    symmetric: bool,
) -> Quantization | None:
    if quant_type != "int4" and (group_size != GROUP_SIZE or symmetric):
        option = "--symmetric" if symmetric else f"--group-size {group_size}"
        raise InvalidRequestError(
            f"{option} is for int4, and --quant-type is {quant_type}: leave it out"
        )
    if quant_type in ("none", "fp16", "bf16"):
        if keep is not None:
            raise InvalidRequestError(
                "--keep says what is not quantised, and nothing is: give --quant-type, or leave it "
                "out"
            )
        return None
    kept = ("head",) if keep is None else tuple(keep)
    static = ranges != "dynamic"
    return Quantization(
        kind=quant_type, group_size=group_size, keep=kept, static_activations=static
    )


def _check_kept(quantization: Quantization, source: Path) -> None:
    """Refuse a pattern that is no projection's: it was meant to keep something."""
    from swiftjax.converters.load import open_checkpoint
    from swiftjax.model.layer_pass import PROJECTIONS

    num_layers = open_checkpoint(source, dtype=None).config.num_layers
    names = [f"layers.{i}.{name}" for i in range(num_layers) for name in PROJECTIONS]
    for pattern in quantization.keep:
        if pattern != "head" and not any(fnmatchcase(name, pattern) for name in [*names, "head"]):
            raise InvalidRequestError(
                f"--keep {pattern!r:.80} is the name of no projection: they are head and, of "
                f"layers 0 to {num_layers - 1}, {', '.join(f'layers.0.{n}' for n in PROJECTIONS)}"
            )

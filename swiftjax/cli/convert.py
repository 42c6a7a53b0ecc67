"""`swiftjax convert`: any readable checkpoint into a native one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftjax.cli.loading import progress
from swiftjax.cli.options import MODEL_HELP, Quiet
from swiftjax.cli.reporting import print_line
from swiftjax.config import Dtype

if TYPE_CHECKING:
    from swiftjax.converters.convert import ConvertReport


def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help=MODEL_HELP)],
    dst: Annotated[
        Path, typer.Argument(metavar="DST", help="Directory to write; must not exist yet.")
    ],
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Type of the weights.", show_default="as in SRC; GGUF: float32"),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a native checkpoint at DST.", show_default="off"),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Convert a checkpoint into SwiftJAX's own format.

    DST appears whole or not at all. No GPU is used.
    """
    from swiftjax.converters.demo_model import resolve_model

    written = convert_on_cpu(resolve_model(src), dst, dtype=dtype, force=force, quiet=quiet)
    if not quiet:
        print_line(
            f"{written.destination}: {written.config.family}, "
            f"{written.num_params / 1e6:,.1f} million parameters in {written.config.dtype}, "
            f"{written.num_bytes / 2**20:,.0f} MiB, {written.seconds:.1f} s"
        )


def convert_on_cpu(
    src: Path, dst: Path, *, dtype: Dtype | None, force: bool, quiet: bool
) -> "ConvertReport":
    """Convert without touching a GPU, whose memory jax would take although no device is needed."""
    import jax

    from swiftjax.converters.convert import convert as convert_checkpoint

    jax.config.update("jax_platforms", "cpu")
    with progress(f"converting {src.name}", quiet=quiet) as report:
        return convert_checkpoint(src, dst, dtype=dtype, force=force, progress=report)

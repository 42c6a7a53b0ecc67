"""`swiftjax convert`: any readable checkpoint into a native one."""

from pathlib import Path
from typing import Annotated

import typer

from swiftjax.cli.loading import progress
from swiftjax.cli.options import MODEL_HELP, DtypeOption, Quiet
from swiftjax.cli.reporting import print_line


def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help=MODEL_HELP)],
    dst: Annotated[
        Path, typer.Argument(metavar="DST", help="Directory to write; must not exist yet.")
    ],
    dtype: DtypeOption = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a native checkpoint at DST.", show_default="off"),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Convert a checkpoint into SwiftJAX's own format.

    DST appears whole or not at all.
    """
    from swiftjax.converters.convert import convert as convert_checkpoint
    from swiftjax.converters.demo_model import resolve_model

    with progress(f"converting {src}", quiet=quiet) as report:
        path = resolve_model(src)
        written = convert_checkpoint(path, dst, dtype=dtype, force=force, progress=report)
    if not quiet:
        print_line(
            f"{written.destination}: {written.config.family}, "
            f"{written.num_params / 1e6:,.1f} million parameters in {written.config.dtype}, "
            f"{written.num_bytes / 2**20:,.0f} MiB, {written.seconds:.1f} s"
        )

"""The `swiftjax` command: a file per subcommand; options, loading and reporting are shared.

Nothing here imports jax or grpc at the top, so that `--help` answers at once. Exit codes: 0, 2 for
bad usage or input, 1 for a failure at run time, 130 for an interrupt.
"""

from typing import Annotated

import typer

from swiftjax import __version__
from swiftjax.cli import bench_kernels as bench_kernels
from swiftjax.cli import bench_offline as bench_offline
from swiftjax.cli import bench_serving as bench_serving
from swiftjax.cli import bench_streaming as bench_streaming
from swiftjax.cli.bench import bench
from swiftjax.cli.chat import chat
from swiftjax.cli.convert import convert
from swiftjax.cli.demo import demo
from swiftjax.cli.doctor import doctor
from swiftjax.cli.evaluate import evaluate
from swiftjax.cli.generate import generate
from swiftjax.cli.parity import parity
from swiftjax.cli.plan import plan
from swiftjax.cli.replay import replay
from swiftjax.cli.reporting import ReportingGroup
from swiftjax.cli.serve import serve

app = typer.Typer(
    cls=ReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long option names short
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"swiftjax {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks.", show_default="SWIFTJAX_DEBUG=1, else off"),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run LLaMA-family language models with JAX."""


for command in (convert, generate, chat, serve, plan, parity, replay, doctor, demo):
    app.command()(command)
app.command("eval")(evaluate)


app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; the entry point of the installed script."""
    app(prog_name="swiftjax")

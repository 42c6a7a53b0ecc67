"""`swiftjax bench`: speeds, as a table and as records; a file per kind of measurement.

Here are the options that several of them take, and the two short ones: `startup` and `plot`.
"""

from pathlib import Path
from typing import Annotated

import typer

from swiftjax.cli.bench_report import flags_of, report, run_of
from swiftjax.cli.options import LoadFormatOption
from swiftjax.errors import InvalidRequestError

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure speeds.")

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "--shape", help="A model, or with --load-format dummy a shape such as llama3-8b."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for results; a folder per machine is made in it.", metavar="DIR"),
]
Commit = Annotated[
    str | None, typer.Option(help="Commit to record where there is no git.", show_default="git's")
]
Seqs = Annotated[
    int | None,
    typer.Option("--max-num-seqs", "--max-batch-size", help="Most sequences that run together."),
]
Tokens = Annotated[int | None, typer.Option(help="Most tokens in a step.")]
Length = Annotated[int | None, typer.Option(help="Longest prompt plus answer, in tokens.")]
Overlap = Annotated[
    bool | None,
    typer.Option(help="Dispatch a step before the last one is read.", show_default="on a GPU"),
]


@bench.command()
def startup(
    model: ModelOption = "smollm2-135m",
    load_format: LoadFormatOption = "auto",
    max_batch_size: Seqs = None,
    max_num_batched_tokens: Tokens = None,
    max_model_len: Length = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Time from the start of a process to its first token, as the caches are and once warm."""
    from swiftjax.bench.startup import measure_startup

    sizes = flags_of(
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    figures, dtype = measure_startup(["--model", model, "--load-format", load_format, *sizes])
    report(figures, run_of(dtype, model, commit, None), out, "startup")


@bench.command()
def plot(
    file: Annotated[Path, typer.Argument(help="A result file of another bench command.")],
) -> None:
    """Draw curves, or how near each figure comes to its limit, as a picture beside the file."""
    from swiftjax.bench.plots import plot_file

    if not file.is_file():
        raise InvalidRequestError(f"{file} does not exist; give a result file such as latency.json")
    typer.echo(f"written to {plot_file(file)}")

"""`swiftjax parity`: a model's hidden states, layer by layer, beside those of transformers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftjax.cli import options as opt
from swiftjax.cli.loading import progress
from swiftjax.model_config import Dtype

if TYPE_CHECKING:
    from swiftjax.converters.load import LoadedCheckpoint
    from swiftjax.evaluation.parity import Difference, States

TextFile = Annotated[
    Path | None, typer.Option("--text", help="A text file.", show_default="a bundled novel")
]
Tokens = Annotated[int, typer.Option(help="Compare on so many tokens of it.", min=2)]
ParityDtype = Annotated[Dtype, typer.Option(help="Type of weights and activations.")]
Golden = Annotated[
    Path | None,
    typer.Option(
        help="Compare with this file of states, and its tokens.",
        metavar="FILE",
        show_default="transformers; without it a file that comes with SwiftJAX",
    ),
]
Save = Annotated[
    Path | None,
    typer.Option(help="Write a sample of transformers' states as such a file.", metavar="FILE"),
]
Tolerance = Annotated[
    float, typer.Option(help="End with 1 where the logits' relative difference is larger.")
]


def parity(
    model: opt.Model,
    text: TextFile = None,
    tokens: Tokens = 64,
    golden: Golden = None,
    save: Save = None,
    dtype: ParityDtype = "float32",
    quant_type: opt.QuantTypeOption = None,
    implementation: opt.Implementation = None,
    tolerance: Tolerance = 1e-3,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Show how far each layer's output is from the one that transformers computes in float32."""
    from swiftjax.converters.demo_model import resolve_model
    from swiftjax.converters.load import load_checkpoint
    from swiftjax.evaluation.parity import differences, our_states, write_golden
    from swiftjax.sizing import configure_jax

    configure_jax(0.9)
    path = resolve_model(model)
    with progress(f"loading {model}", quiet=quiet) as report:
        loaded = load_checkpoint(
            path, dtype=dtype, quantization=opt.quantization(quant_type), progress=report
        )
    theirs = _their_states(model, path, loaded, golden, text, tokens)
    if save is not None:
        write_golden(save, theirs)
    found = differences(our_states(loaded, theirs.token_ids, implementation), theirs)
    if as_json:
        print(json.dumps([asdict(difference) for difference in found]))
    else:
        _print_table(found)
    if not found[-1].relative <= tolerance:
        raise typer.Exit(1)


def _their_states(
    name: str,
    path: Path,
    loaded: "LoadedCheckpoint",
    golden: Path | None,
    text: Path | None,
    tokens: int,
) -> "States":
    from swiftjax.engine.tokenizer import Tokenizer
    from swiftjax.evaluation.parity import GOLDENS, has_transformers, read_golden, their_states
    from swiftjax.evaluation.texts import cut_text, read_text

    stored = GOLDENS / f"{name}.npz"
    if golden is None and not has_transformers() and stored.exists():
        golden = stored
    if golden is not None:
        return read_golden(golden)
    tokenizer = Tokenizer(loaded.tokenizer_files)
    (piece,) = cut_text(read_text(text), tokenizer, length=tokens, num_tokens=tokens)
    return their_states(path, piece)


def _print_table(found: "list[Difference]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("after", "relative difference", "largest difference")
    for one in found:
        table.add_row(one.name, f"{one.relative:.2e}", f"{one.largest:.2e}")
    Console(highlight=False).print(table)

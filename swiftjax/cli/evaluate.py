"""`swiftjax eval`: perplexity of a model, and its distance to a baseline, on a text."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftjax.cli import options as opt
from swiftjax.cli.bench_report import run_of
from swiftjax.cli.loading import progress
from swiftjax.config import KVCacheDtype
from swiftjax.errors import InvalidRequestError
from swiftjax.model_config import Dtype
from swiftjax.quantization import Quantization

if TYPE_CHECKING:
    from swiftjax.bench.records import Figure
    from swiftjax.evaluation.loading import ScoredModel
    from swiftjax.evaluation.quality import Quality

Baseline = Annotated[
    str | None,
    typer.Option(
        help="Compare with this model; it must have the same vocabulary.", metavar="MODEL"
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        help="A text file, or a .jsonl file with the field 'text'.", show_default="a bundled novel"
    ),
]
Tokens = Annotated[int, typer.Option(help="Read so many tokens of the text.")]
Context = Annotated[int, typer.Option(help="Tokens of a piece; nothing is seen across pieces.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw the result as a picture.", metavar="FILE")
]
Out = Annotated[Path | None, typer.Option(help="Folder for a record of the result.", metavar="DIR")]


def evaluate(
    model: opt.Model,
    baseline: Baseline = None,
    text: Text = None,
    tokens: Tokens = 8192,
    context: Context = 512,
    dtype: opt.DtypeOption = None,
    quant_type: opt.QuantTypeOption = None,
    kv_cache_dtype: opt.KVCacheDtypeOption = "auto",
    implementation: opt.Implementation = None,
    plot: PlotFile = None,
    out: Out = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure a model's perplexity on a text and, with --baseline, what differs from another.

    --dtype is for both models, --quant-type and --kv-cache-dtype for MODEL only: with --baseline
    MODEL they tell what fewer bits cost.
    """
    from swiftjax.evaluation.quality import score_texts, summarise
    from swiftjax.evaluation.texts import cut_text, read_text

    if plot is not None:
        from swiftjax.replay.plot import check_matplotlib

        check_matplotlib()
    novel = read_text(text)
    load = partial(_load, dtype=dtype, length=context, implementation=implementation, quiet=quiet)
    measured = load(model, opt.quantization(quant_type), kv_cache_dtype)
    pieces = cut_text(novel, measured.tokenizer, length=context, num_tokens=tokens)
    other = None if baseline is None else load(baseline, None, "auto")
    if other is not None:
        _check_vocabulary(measured, other)
    with progress("scoring", quiet=quiet) as report:
        scores = score_texts(
            measured.model, pieces, baseline=other and other.model, progress=report
        )
    quality = summarise(scores)
    facts = {
        "model": model, "baseline": baseline, "context": context, "quant_type": quant_type,
        "kv_cache_dtype": None if kv_cache_dtype == "auto" else kv_cache_dtype,
    }  # fmt: skip
    dtype_used = measured.model.config.dtype
    if as_json:
        change = {"perplexity_change": quality.perplexity_change}
        print(json.dumps({**facts, "dtype": dtype_used, **asdict(quality), **change}))
    else:
        _print_table(quality)
    if plot is not None:
        from swiftjax.evaluation.plot import plot_scores

        plot_scores(plot, scores, piece=len(scores.losses) // len(pieces), title=_title(facts))
    if out is not None:
        _write(out, quality, facts, dtype_used)


def _load(
    name: str,
    quantization: Quantization | None,
    kv_cache_dtype: KVCacheDtype,
    *,
    dtype: Dtype | None,
    length: int,
    implementation: str | None,
    quiet: bool,
) -> "ScoredModel":
    from swiftjax.evaluation.loading import load_scored

    with progress(f"loading {name}", quiet=quiet) as report:
        return load_scored(
            name, dtype=dtype, quantization=quantization, length=length,
            implementation=implementation, kv_cache_dtype=kv_cache_dtype, progress=report,
        )  # fmt: skip


def _check_vocabulary(model: "ScoredModel", baseline: "ScoredModel") -> None:
    ours, theirs = model.model.config.vocab_size, baseline.model.config.vocab_size
    if ours != theirs:
        raise InvalidRequestError(
            f"the model has {ours} tokens and the baseline {theirs}: only models of one vocabulary "
            "can be compared"
        )


def _title(facts: dict[str, Any]) -> str:
    parts = [Path(facts["model"]).name, facts["quant_type"]]
    if facts["kv_cache_dtype"]:
        parts.append(f"KV {facts['kv_cache_dtype']}")
    name = " ".join(part for part in parts if part)
    return name if facts["baseline"] is None else f"{name} against {Path(facts['baseline']).name}"


def _print_table(quality: "Quality") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "model", *(["baseline"] if quality.divergence is not None else []))
    rows = [("tokens scored", f"{quality.num_tokens:,}", "")]
    base = quality.baseline_perplexity
    rows.append(("perplexity", f"{quality.perplexity:.3f}", "" if base is None else f"{base:.3f}"))
    if quality.divergence is not None:
        assert quality.perplexity_change is not None and quality.agreement is not None
        error = 2 * (quality.loss_increase_error or 0.0)
        rows += [
            ("perplexity, change", f"{quality.perplexity_change:+.2%} (+- {error:.2%})", ""),
            ("KL divergence, nats a token", f"{quality.divergence:.5f}", ""),
            ("same likeliest token", f"{quality.agreement:.2%}", ""),
        ]
    for row in rows:
        table.add_row(*row[: len(table.columns)])
    Console(highlight=False).print(table)


def _write(out: Path, quality: "Quality", facts: dict[str, Any], dtype: Dtype | None) -> None:
    from swiftjax.bench.records import machine_name, make_record, write_records

    run = run_of(dtype, Path(facts["model"]).name, None, None)
    path = out / machine_name() / "quality.json"
    write_records(path, [make_record(_figure(quality, facts), run)])
    typer.echo(f"written to {path}", err=True)


def _figure(quality: "Quality", facts: dict[str, Any]) -> "Figure":
    from swiftjax.bench.records import Figure

    details = {name: value for name, value in asdict(quality).items() if value is not None}
    details |= {k: v for k, v in facts.items() if v is not None and k not in ("model", "context")}
    details |= {"perplexity_change": quality.perplexity_change}
    return Figure(
        workload="perplexity",
        batch=1,
        context=facts["context"],
        value=quality.perplexity,
        unit="perplexity",
        spread=(quality.perplexity, quality.perplexity),
        details=details,
    )

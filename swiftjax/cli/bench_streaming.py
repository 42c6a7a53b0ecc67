"""`swiftjax bench streaming`: endless text, a million tokens, chats with and without sessions."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from swiftjax.cli.bench import Commit, ModelOption, Out, bench
from swiftjax.cli.bench_report import check_known, report, run_of
from swiftjax.cli.loading import load_core, progress
from swiftjax.cli.options import DtypeOption, Implementation, LoadFormatOption, Quiet
from swiftjax.config import EngineConfig

if TYPE_CHECKING:
    from swiftjax.api import Engine
    from swiftjax.bench.records import Figure
    from swiftjax.engine.streaming import Streaming

PARTS = ("endless", "position", "turns", "perplexity")


@bench.command()
def streaming(
    model: ModelOption = "smollm2-135m",
    load_format: LoadFormatOption = "auto",
    part: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; the first three by default.")
    ] = None,
    sink: Annotated[int, typer.Option(help="First tokens that stay visible.")] = 4,
    window: Annotated[int, typer.Option(help="Last tokens that stay visible.")] = 2000,
    tokens: Annotated[int, typer.Option(help="How many are generated: endless.")] = 100_000,
    position: Annotated[int, typer.Option(help="How far into a text: position.")] = 1_000_000,
    steps: Annotated[int, typer.Option(help="Tokens timed at each place: position.")] = 256,
    answer: Annotated[
        list[int] | None, typer.Option(help="Tokens of an answer: turns; 512 and 1024 by default.")
    ] = None,
    turns: Annotated[int, typer.Option(help="Turns of a chat: turns.")] = 5,
    length: Annotated[int, typer.Option(help="Tokens of the bundled novel: perplexity.")] = 4096,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens in a step.")] = 2048,
    dtype: DtypeOption = None,
    implementation: Implementation = None,
    out: Out = None,
    commit: Commit = None,
    quiet: Quiet = False,
) -> None:
    """Endless text: pages, time and memory on the way; tokens at a million; turns of a chat."""
    parts, answers = part or list(PARTS[:3]), answer or [512, 1024]
    check_known("part", parts, PARTS)
    longest = sink + window + max(answers) + 256
    if "perplexity" in parts:
        longest = max(longest, length + 1)
    config = EngineConfig(
        model_path=model, load_format=load_format, dtype=dtype, streaming=True,
        max_batch_size=1, max_num_batched_tokens=max_num_batched_tokens, max_model_len=longest,
        max_total_token_num=6 * longest, implementation=implementation, prefix_cache=False,
    )  # fmt: skip
    built = load_core(config, warm=parts != ["perplexity"], quiet=quiet)
    from swiftjax.api import Engine
    from swiftjax.engine.streaming import Streaming

    engine, asked = Engine.from_core(built), Streaming(sink=sink, window=window)
    run = run_of(built.model_config.dtype, model, commit, implementation)

    for name in parts:
        if name == "perplexity":
            report(_perplexity(engine, asked, length), run, out, "streaming_quality")
            continue
        if name == "endless":
            figures = [_endless(engine, asked, tokens, quiet)]
        else:
            figures = _measure(engine, name, asked, (position, steps, answers, turns))
        report(figures, run, out, "streaming")


def _perplexity(engine: "Engine", asked: "Streaming", length: int) -> "Iterator[Figure]":
    from swiftjax.bench.streaming_quality import measure_perplexity
    from swiftjax.evaluation.texts import cut_text, read_text

    novel = read_text(None)
    [tokens] = cut_text(novel, engine.tokenizer, length=length, num_tokens=length)
    yield from measure_perplexity(engine, tokens.tolist(), asked)


def _endless(engine: "Engine", asked: "Streaming", tokens: int, quiet: bool) -> "Figure":
    from swiftjax.bench.streaming import measure_endless

    with progress("endless", quiet=quiet) as tell:
        return measure_endless(engine, asked, tokens, tell)


def _measure(
    engine: "Engine", part: str, asked: "Streaming", sizes: tuple[int, int, list[int], int]
) -> "Iterator[Figure]":
    from swiftjax.bench import streaming as s

    position, steps, answers, turns = sizes
    if part == "position":
        near = asked.shared_len()
        yield from s.measure_position(engine, asked, (near, position), steps)
    else:
        for length in answers:
            yield from s.measure_turns(engine, asked, s.Turns(length, count=turns))

"""`swiftjax replay`: recorded or drawn requests through the scheduler again, without a model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftjax.cli.policy_file import read_policy
from swiftjax.cli.reporting import print_line
from swiftjax.config import QUEUE_POLICY_NAMES, QueuePolicyChoice
from swiftjax.errors import InvalidRequestError

if TYPE_CHECKING:
    from swiftjax.replay.comparison import Study
    from swiftjax.replay.cost_model import CostModel
    from swiftjax.replay.metrics import Spread, Summary
    from swiftjax.replay.workload import Workload

RECORDED = "recorded"
PRESET = "llama3-8b-h200"

Trace = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE", help="What --trace recorded.", show_default="requests drawn by --synthetic"
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help=f"{', '.join(QUEUE_POLICY_NAMES)}, or path/to/file.py:function; can be given several "
        "times.",
        show_default="each of those with a name",
    ),
]
CostModelName = Annotated[
    str | None,
    typer.Option(
        "--cost-model",
        metavar="MODEL",
        help=f"How long a step takes: a preset ({PRESET}), a JSON file with the four "
        f"numbers, or '{RECORDED}': step by step as in FILE, to check that the plans are the same.",
        show_default=f"fitted to the steps in FILE; {PRESET} without one",
    ),
]
Synthetic = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Draw the requests instead: poisson:8 for 8 a second, with prompts of 64 to 512 and "
        "answers of 64 to 256 tokens.",
        show_default="off",
    ),
]
Requests = Annotated[int, typer.Option(min=1, help="How many requests --synthetic draws.")]
Seed = Annotated[int, typer.Option(help="Of --synthetic: the same seed draws the same requests.")]
_SIZE = "as recorded"
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(min=1, help="Most requests in one step.", show_default=f"{_SIZE}, or 64"),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens in one step.", show_default=f"{_SIZE}, or 2048"),
]
PageSize = Annotated[
    int | None, typer.Option(min=1, help="Tokens in a KV page.", show_default=f"{_SIZE}, or 64")
]
MaxTotalTokenNum = Annotated[
    int | None,
    typer.Option(
        min=1, help="Size of the KV cache, in tokens.", show_default=f"{_SIZE}, or 524288"
    ),
]
TtftGoal = Annotated[
    float, typer.Option(help="Goodput: most seconds until the first token of a good answer.")
]
InterTokenGoal = Annotated[
    float, typer.Option(help="Goodput: most seconds between its tokens, on average.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="OUT", help="Write the figures.", show_default="off"),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="OUT",
        help="Draw them, as .png or .svg; needs the extra 'plot'.",
        show_default="off",
    ),
]


def replay(
    trace: Trace = None,
    policy: Policies = None,
    cost_model: CostModelName = None,
    synthetic: Synthetic = None,
    requests: Requests = 500,
    seed: Seed = 7,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    page_size: PageSize = None,
    max_total_token_num: MaxTotalTokenNum = None,
    ttft_goal: TtftGoal = 0.5,
    inter_token_goal: InterTokenGoal = 0.03,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Compare queue policies on recorded or drawn requests, by simulation; no model is loaded.

    The requests of FILE come again at their times, with their lengths, to the real scheduler; a
    cost model says how long steps take.
    """
    from swiftjax.replay.comparison import compare
    from swiftjax.replay.metrics import Goal
    from swiftjax.replay.plot import check_matplotlib

    if (trace is None) == (synthetic is None):
        raise InvalidRequestError("give either a trace FILE or --synthetic, such as poisson:8")
    policies: list[QueuePolicyChoice] = [read_policy(text) for text in policy or ()]
    if plot_file is not None:
        check_matplotlib()
    workload = _read(trace) if trace is not None else _draw(synthetic or "", requests, seed)
    sizes = (max_num_seqs, max_num_batched_tokens, page_size, max_total_token_num)
    if cost_model == RECORDED:
        return _check_same(workload, policies, any(size is not None for size in sizes))
    model = _choose_model(cost_model or (PRESET if trace is None else None), workload)
    goal = Goal(ttft=ttft_goal, inter_token=inter_token_goal)
    study = compare(workload.resized(*sizes), policies or QUEUE_POLICY_NAMES, model, goal)
    _report(study, model, str(trace or synthetic), json_file, plot_file)


def _read(path: Path) -> "Workload":
    from swiftjax.replay.trace_file import read_trace

    return read_trace(path)


def _draw(kind: str, count: int, seed: int) -> "Workload":
    """Drawn requests, for an engine with the sizes that a GPU chooses."""
    from swiftjax.config import SchedulerConfig
    from swiftjax.replay.workload import Workload, draw

    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_queue_len=count)
    arrivals = draw(kind, count, seed)
    return Workload(config=config, page_size=64, num_pages=8192, arrivals=arrivals)


def _check_same(workload: "Workload", policies: list[QueuePolicyChoice], is_resized: bool) -> None:
    """Say whether the scheduler plans today what it planned when the trace was made."""
    from swiftjax.replay.simulation import simulate
    from swiftjax.replay.timelines import Recorded

    if is_resized or len(policies) > 1 or not workload.steps:
        raise InvalidRequestError(
            f"--cost-model {RECORDED} repeats the steps of a FILE as they were: leave out sizes, "
            "--synthetic and all policies but its own"
        )
    recorded = workload.config.policy
    if not policies and recorded not in QUEUE_POLICY_NAMES:
        raise InvalidRequestError(
            f"the trace was made under {recorded!r}, which is none of the built-in policies: give "
            "it with --policy path/to/file.py:function"
        )
    timeline = Recorded(workload.steps)
    simulate(workload.with_policy(policies[0]) if policies else workload, timeline)
    print(f"{timeline.num_equal} of {len(workload.steps)} steps planned as recorded")
    if timeline.num_equal < len(workload.steps):
        raise typer.Exit(1)


def _choose_model(name: str | None, workload: "Workload") -> "CostModel":
    from swiftjax.replay.cost_model import fit, read_cost_model, relative_error

    if name is not None:
        return read_cost_model(name)
    model = fit(workload.steps)
    error = relative_error(model, workload.steps)
    numbers = ", ".join(f"{key} {value:.3g}" for key, value in model.as_dict().items())
    print_line(f"cost model in seconds: {numbers}; half of the steps within {error:.0%}")
    return model


def _report(
    study: "Study", model: "CostModel", source: str, json_file: Path | None, plot_file: Path | None
) -> None:
    from swiftjax.replay.plot import plot

    _print_table(study.summaries)
    if json_file is not None:
        figures = {"source": source, "cost_model": model.as_dict(), **study.as_json()}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    if plot_file is not None:
        plot(plot_file, study, source)


def _print_table(summaries: "list[Summary]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for name in ("waiting", "first token", "between tokens"):
        table.add_column(f"{name}\np50 / p99 ms", justify="right", no_wrap=True)
    for name in ("goodput", "tokens/s", "preempted", "answered"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in summaries:
        table.add_row(
            one.policy,
            *(_milliseconds(spread) for spread in (one.waiting, one.ttft, one.inter_token)),
            "-" if one.goodput is None else f"{one.goodput:.1%}",
            f"{one.tokens_per_second:,.0f}",
            str(one.preemptions),
            f"{one.answered} of {one.requests}",
        )
    console = Console()
    # A file or a pipe has no width: nothing is cut there.
    Console(width=max(console.width, 0 if console.is_terminal else 120)).print(table)


def _milliseconds(spread: "Spread") -> str:
    if spread.p50 is None or spread.p99 is None:
        return "-"
    return f"{spread.p50 * 1e3:,.1f} / {spread.p99 * 1e3:,.1f}"

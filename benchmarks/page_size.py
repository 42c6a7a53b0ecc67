"""Page sizes: how much of a chat's past is found again, against the speed of a decode step.

    python -m benchmarks.page_size --machine cpu --shape smollm2-135m --implementation xla
    python -m benchmarks.page_size --machine h200 --shape llama3-8b --implementation triton

Reuse needs no device: chats run through the real scheduler over a fake model. Speed is that of
`swiftjax bench step` with random weights. Records and a plot go to
benchmarks/results/<machine>/page_size.json.
"""

import argparse
import datetime
import random
from pathlib import Path
from typing import Any

from benchmarks.records import commit, cpu_name, write_records
from swiftjax import kernels
from swiftjax.engine.core import EngineCore
from swiftjax.engine.request import GenerationConfig
from swiftjax.shapes import SHAPES
from tests.fakes import FakeRunner, make_fake_core, make_request

RESULTS = Path(__file__).parent / "results"
PAGE_SIZES = (16, 32, 64, 128)
VOCAB_SIZE = 32_000
CHATS, TURNS, AT_ONCE = 96, 6, 16
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 300, (10, 90), (20, 200)
POOL_TOKENS = 65_536  # about a third of what all chats come to: old ones are evicted


class NoRunner(FakeRunner):
    """Answers at once and remembers no batch."""

    def dispatch(self, batch: Any, moves: Any) -> Any:
        """The counted-up tokens."""
        pending = super().dispatch(batch, moves)
        self.batches.clear()
        return pending


class Chats:
    """Users who share a system prompt and talk in turns, some of them at the same time."""

    def __init__(self, page_size: int) -> None:
        self.core: EngineCore = make_fake_core(
            vocab_size=VOCAB_SIZE, num_pages=POOL_TOKENS // page_size, page_size=page_size,
            max_model_len=4096, max_num_seqs=AT_ONCE, max_num_batched_tokens=2048,
            max_queue_len=CHATS, runner=NoRunner(VOCAB_SIZE),
        )  # fmt: skip
        self.rng = random.Random(7)
        system = [self.rng.randrange(VOCAB_SIZE) for _ in range(SYSTEM_TOKENS)]
        self.texts = [list(system) for _ in range(CHATS)]
        self.num_prompt = self.num_reused = self.num_new = 0

    def run(self) -> None:
        """Everybody's first turn, in an order of its own, then everybody's second, and so on."""
        for turn in range(TURNS):
            order = self.rng.sample(range(CHATS), CHATS)
            for first in range(0, CHATS, AT_ONCE):
                self._take_turns(turn, order[first : first + AT_ONCE])

    def _take_turns(self, turn: int, chats: list[int]) -> None:
        sequences = []
        for chat in chats:
            user = [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randint(*USER_TOKENS))]
            answer_len = self.rng.randint(*ANSWER_TOKENS)
            # What no earlier prompt or answer held, or what the system prompt's first use computes.
            self.num_new += len(user) + (1 if turn else 0)
            self.texts[chat] += user
            config = GenerationConfig(max_new_tokens=answer_len, ignore_eos=True)
            request = make_request(self.core, self.texts[chat], config, request_id=f"{chat}/{turn}")
            self.core.submit(request)
            sequences.append((chat, self.core.scheduler.sequences.by_id[request.request_id]))
        while self.core.has_work:
            self.core.step()
        for chat, sequence in sequences:
            self.texts[chat] = list(sequence.token_ids)
            self.num_prompt += sequence.prompt_len
            self.num_reused += sequence.num_cached or 0


def measure_reuse(page_size: int) -> dict[str, Any]:
    """The share of prompt tokens found in the cache; at most all but each turn's new ones."""
    chats = Chats(page_size)
    chats.run()
    return {
        "workload": "chat reuse", "page_size": page_size, "batch": AT_ONCE,
        "context": round(chats.num_prompt / CHATS / TURNS),
        "value": round(chats.num_reused / chats.num_prompt, 4),
        "unit": "fraction of prompt tokens",
        "limit": round(1 - (chats.num_new + SYSTEM_TOKENS) / chats.num_prompt, 4),
        "prefilled_per_turn": round((chats.num_prompt - chats.num_reused) / CHATS / TURNS, 1),
        "pool_tokens": POOL_TOKENS, "chats": CHATS, "turns": TURNS,
    }  # fmt: skip


def measure_steps(args: argparse.Namespace, page_size: int) -> list[dict[str, Any]]:
    """Decode steps of all asked batch sizes."""
    from swiftjax.bench import records, step

    config = SHAPES[args.shape]
    case = step.StepCase(
        batches=args.batch, contexts=args.context, page_size=page_size,
        implementation=args.implementation,
    )  # fmt: skip
    short = {"float32": "fp32", "bfloat16": "bf16", None: "fp32"}[config.dtype]
    flags = {"implementation": args.implementation}
    run = records.Run(model=args.shape, dtype=short, command="", flags=flags)
    return [records.make_record(f, run) for f in step.measure_steps(config, case, None)]


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw reuse as bars and the time of a decode step as lines over page sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    reuse = [r for r in records if r["workload"] == "chat reuse"]
    sizes = [str(r["page_size"]) for r in reuse]
    bars = left.bar(sizes, [r["prefilled_per_turn"] for r in reuse], color="C0")
    left.bar_label(bars, [f"{r['value']:.1%} reused" for r in reuse], fontsize=7)
    left.set_ylabel("prompt tokens computed a turn")
    left.margins(y=0.15)
    for batch in sorted({r["batch"] for r in records if r["workload"] == "decode step"}):
        rows = [r for r in records if r["workload"] == "decode step" and r["batch"] == batch]
        context = rows[0]["context"]
        right.plot(
            [str(r["page_size"]) for r in rows], [r["value"] for r in rows], "o-",
            label=f"B={batch}, context {context}",
        )  # fmt: skip
    right.set_ylabel("ms a decode step")
    right.set_ylim(bottom=0)
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.set_xlabel("page size, tokens")
    figure.suptitle(f"{records[-1]['model']}: reuse against speed", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description="Reuse against speed, by page size")
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--context", type=int, nargs="+", default=[768])
    parser.add_argument("--implementation", choices=kernels.IMPLEMENTATIONS, default="xla")
    parser.add_argument("--machine", default="cpu", help="folder of the results")
    parser.add_argument("--commit", help="commit to record where git is not there")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder above the machine's")
    args = parser.parse_args()
    command = f"python -m benchmarks.page_size --machine {args.machine} --shape {args.shape}"
    about = {
        "command": f"{command} --implementation {args.implementation}",
        "commit": args.commit or commit(),
        "date": datetime.date.today().isoformat(),
    }
    records = []
    for page_size in PAGE_SIZES:
        reuse = measure_reuse(page_size) | {"model": args.shape, "machine": cpu_name()} | about
        print(f"page {page_size}: {reuse['value']:.1%} reused of at most {reuse['limit']:.1%}, "
              f"{reuse['prefilled_per_turn']} tokens computed a turn", flush=True)  # fmt: skip
        records.append(reuse)
    for page_size in PAGE_SIZES:
        records += [record | about for record in measure_steps(args, page_size)]
    path = args.out / args.machine / "page_size.json"
    write_records(path, records)
    plot(records, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

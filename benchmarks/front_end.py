"""What the front end costs: messages a second that it streams, and time to the first token.

    taskset -c 0,1 python -m benchmarks.front_end

The engine, in a process of its own, computes nothing: its tokens are last + 1. The front end is
that of `swiftjax serve`, the clients run in this process. Steps of different lengths offer some
10,000 to 40,000 tokens a second; what arrives together is one message. Over HTTP messages are
counted, not tokens. Results: benchmarks/results/cpu/front_end.json.
"""

import argparse
import asyncio
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks.records import commit, cpu_name, write_records
from swiftjax.bench.serving_clients import Send, open_client

RESULTS = Path(__file__).parent / "results" / "cpu"
NUM_STREAMS = 64
SECONDS = 3.0
# How long a step of so many streams takes beside its planning; of more streams it takes longer.
STEP_SECONDS = (0.006, 0.003, 0.002, 0.0015)


class Server(NamedTuple):
    """Where a server is, and its processes."""

    grpc: str
    http: str
    front_end: int
    engine: int

    def open_client(self, protocol: str) -> AbstractAsyncContextManager[Send, bool | None]:
        """Open the client of a protocol."""
        return open_client(protocol, grpc=self.grpc, http=self.http.removeprefix("http://"))


@contextmanager
def server(step_seconds: float, num_streams: int = NUM_STREAMS) -> Iterator[Server]:
    """Run a server with its engine."""
    command = [sys.executable, "-m", "benchmarks.front_end", "--serve", str(step_seconds)]
    command += ["--streams", str(num_streams)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        engine, *lines = (process.stdout.readline().split() for _ in range(3))
        yield Server(lines[0][3], lines[1][3], process.pid, int(engine[0]))
    finally:
        process.terminate()
        process.communicate()


def serve(step_seconds: float, num_streams: int) -> int:
    """Be the server, until a signal."""
    from swiftjax.engine.async_engine import AsyncEngine
    from swiftjax.engine.process_link import ProcessLink
    from swiftjax.engine.tokenizer import Tokenizer
    from swiftjax.serving.engine_watch import EngineWatch
    from swiftjax.serving.listeners import Listen
    from swiftjax.serving.messages import describe_model
    from swiftjax.serving.served import Served
    from swiftjax.serving.server import run_server
    from tests.serving.fake_engine import COMMAND

    watch = EngineWatch()

    async def load() -> Served:
        core = {
            "delay": step_seconds, "max_num_seqs": num_streams, "max_queue_len": num_streams + 64,
            "num_pages": 1600 * num_streams,
        }  # fmt: skip
        link, info = await ProcessLink.start(
            COMMAND, json.dumps({"core": core, "forgets": True}).encode()
        )
        print(link.pid, flush=True)
        engine = AsyncEngine(link, Tokenizer(info.tokenizer_files), info.limits, None, watch.take)
        model = describe_model("bytes", info.model, info.limits, engine.tokenizer)
        return Served(engine, model, watch)

    running = run_server(
        load, Listen(http_port=0), drain_seconds=1.0, announce=lambda line: print(line, flush=True)
    )
    return uvloop.run(running)


class Cost(NamedTuple):
    """What the clients got a second, and microseconds of CPU a message took in each process."""

    messages: float
    tokens: float
    front_end: float
    engine: float
    client: float


async def measure_cost(
    send: Send, served: Server, seconds: float = SECONDS, num_streams: int = NUM_STREAMS
) -> Cost:
    """Keep all streams open and look at some seconds of it."""
    counts = [0, 0]

    async def one() -> None:
        while True:
            async for num_tokens in send([97], 4000):
                counts[0] += 1
                counts[1] += num_tokens

    def look() -> tuple[float, ...]:
        processes = (cpu_seconds(served.front_end), cpu_seconds(served.engine), time.process_time())
        return (time.perf_counter(), *counts, *processes)

    async with running(one, num_streams):
        await asyncio.sleep(1.0)
        before = look()
        await asyncio.sleep(seconds)
        took, messages, tokens, *cpu = (b - a for a, b in zip(before, look(), strict=True))
    return Cost(messages / took, tokens / took, *(x / messages * 1e6 for x in cpu))


async def measure_first(send: Send, num_others: int, step_seconds: float) -> list[float]:
    """Milliseconds to the first token of short requests, one after the other, beside others.

    Without the step that makes it; beside others they also wait for half of one that runs.
    """

    async def other() -> None:
        while True:
            async for _ in send([97], 4000):
                pass

    times = []
    async with running(other, num_others):
        await asyncio.sleep(0.5)
        for _ in range(100):
            begun = time.perf_counter()
            seen = [time.perf_counter() async for _ in send([97], 1)]
            times.append((seen[0] - begun - step_seconds) * 1e3)
            await asyncio.sleep(0.005)
    return times


def step_clock(served: Server) -> tuple[float, float]:
    """Seconds and number of all steps so far, as the engine measured them from plan to tokens."""
    with urllib.request.urlopen(f"{served.http}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r"^swiftjax_step_seconds_(sum|count){.*} (\S+)$", text, re.MULTILINE)
    seconds, count = (sum(float(v) for name, v in found if name == n) for n in ("sum", "count"))
    return seconds, count


@asynccontextmanager
async def running(work: Callable[[], Awaitable[None]], count: int) -> AsyncIterator[None]:
    """Do something several times at once for as long as the context lasts."""
    tasks = [asyncio.ensure_future(work()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def measure(
    protocol: str, step_seconds: float, rounds: int, num_streams: int
) -> list[dict[str, Any]]:
    """The best of some rounds against one server, as records."""

    async def main(served: Server) -> tuple[list[Cost], list[float], float, list[float]]:
        async with served.open_client(protocol) as send:
            costs = [await measure_cost(send, served, SECONDS, num_streams) for _ in range(rounds)]
            await asyncio.sleep(0.5)
            before = step_clock(served)
            alone = await measure_first(send, 0, step_seconds)
            seconds, count = (b - a for a, b in zip(before, step_clock(served), strict=True))
            beside = await measure_first(send, num_streams // 2, step_seconds)
            return costs, alone, seconds / count * 1e3, beside

    with server(step_seconds, num_streams) as served:
        costs, alone, engine_step_ms, beside = uvloop.run(main(served))
    best = max(costs)
    shared = {
        "protocol": protocol, "batch": num_streams, "step_ms": step_seconds * 1e3,
        "gpu": cpu_name(), "load": round(os.getloadavg()[0], 1), "commit": commit(),
        "command": f"python -m benchmarks.front_end --streams {num_streams}",
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    rate = {
        "workload": "streamed messages", "unit": "messages/s", "value": round(best.messages),
        "spread": [round(min(costs).messages), round(best.messages)], "limit": 20_000,
        "cpu_us_per_message": {
            name: round(getattr(best, name), 1) for name in ("front_end", "engine", "client")
        },
    }  # fmt: skip
    if protocol == "grpc":
        rate["tokens_per_s"] = round(best.tokens)
    firsts = [
        {
            "workload": f"added to the first token, {where}", "unit": "ms", "limit": 3.0,
            "value": round(statistics.median(times), 2),
            "spread": [round(min(times), 2), round(max(times), 2)],
        }
        for where, times in (("alone", alone), (f"beside {num_streams // 2} streams", beside))
    ]  # fmt: skip
    # The value is beyond the nominal step; an engine also plans, and its clock is not exact.
    beyond = firsts[0]["value"] + step_seconds * 1e3 - engine_step_ms
    firsts[0] |= {"engine_step_ms": round(engine_step_ms, 2), "beyond_it": round(beyond, 2)}
    return [shared | record for record in (rate, *firsts)]


def main() -> None:
    """Measure and write the records, or be the server that is measured."""
    parser = argparse.ArgumentParser(description="Cost of the front end")
    parser.add_argument("--serve", type=float, help="be a server with steps of so many seconds")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "front_end.json")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        sys.exit(serve(arguments.serve, arguments.streams))
    records = []
    for protocol in ("grpc", "http"):
        for step_seconds in STEP_SECONDS:
            step = step_seconds * arguments.streams / NUM_STREAMS
            records += measure(protocol, step, arguments.rounds, arguments.streams)
            print(json.dumps(records[-3:]), flush=True)
    write_records(arguments.out, records)


if __name__ == "__main__":
    main()

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

from benchmarks.front_end_clients import Read, open_grpc, open_http
from benchmarks.records import commit, cpu_name, write_records

RESULTS = Path(__file__).parent / "results" / "cpu"
NUM_STREAMS = 64
SECONDS = 3.0
# How long a step of the engine takes beside its planning, which sets how many tokens are offered.
STEP_SECONDS = (0.006, 0.003, 0.002, 0.0015)


class Server(NamedTuple):
    """Where a server is, and its processes."""

    grpc: str
    http: str
    front_end: int
    engine: int


@contextmanager
def server(step_seconds: float) -> Iterator[Server]:
    """Run a server with its engine."""
    command = [sys.executable, "-m", "benchmarks.front_end", "--serve", str(step_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        engine, *lines = (process.stdout.readline().split() for _ in range(3))
        yield Server(lines[0][3], lines[1][3], process.pid, int(engine[0]))
    finally:
        process.terminate()
        process.communicate()


def serve(step_seconds: float) -> int:
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
        core = {"delay": step_seconds, "max_num_seqs": NUM_STREAMS, "num_pages": 100_000}
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


def open_client(served: Server, protocol: str) -> AbstractAsyncContextManager[Read]:
    """Open the client of a protocol."""
    return open_grpc(served.grpc) if protocol == "grpc" else open_http(served.http)


class Cost(NamedTuple):
    """What the clients got a second, and microseconds of CPU a message took in each process."""

    messages: float
    tokens: float
    front_end: float
    engine: float
    client: float


async def measure_cost(read: Read, served: Server, seconds: float = SECONDS) -> Cost:
    """Keep all streams open and look at some seconds of it."""
    counts = [0, 0]

    async def one() -> None:
        while True:
            async for num_tokens in read(4000):
                counts[0] += 1
                counts[1] += num_tokens

    def look() -> tuple[float, ...]:
        processes = (cpu_seconds(served.front_end), cpu_seconds(served.engine), time.process_time())
        return (time.perf_counter(), *counts, *processes)

    async with running(one, NUM_STREAMS):
        await asyncio.sleep(1.0)
        before = look()
        await asyncio.sleep(seconds)
        took, messages, tokens, *cpu = (b - a for a, b in zip(before, look(), strict=True))
    return Cost(messages / took, tokens / took, *(x / messages * 1e6 for x in cpu))


async def measure_first(read: Read, num_others: int, step_seconds: float) -> list[float]:
    """Milliseconds to the first token of short requests, one after the other, beside others.

    Without the step that makes it; beside others they also wait for half of one that runs.
    """

    async def other() -> None:
        while True:
            async for _ in read(4000):
                pass

    times = []
    async with running(other, num_others):
        await asyncio.sleep(0.5)
        for _ in range(100):
            begun = time.perf_counter()
            async for _ in read(1):
                times.append((time.perf_counter() - begun - step_seconds) * 1e3)
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


def measure(protocol: str, step_seconds: float, rounds: int) -> list[dict[str, Any]]:
    """The best of some rounds against one server, as records."""

    async def main(served: Server) -> tuple[list[Cost], list[float], float, list[float]]:
        async with open_client(served, protocol) as read:
            costs = [await measure_cost(read, served) for _ in range(rounds)]
            await asyncio.sleep(0.5)
            before = step_clock(served)
            alone = await measure_first(read, 0, step_seconds)
            seconds, count = (b - a for a, b in zip(before, step_clock(served), strict=True))
            beside = await measure_first(read, NUM_STREAMS // 2, step_seconds)
            return costs, alone, seconds / count * 1e3, beside

    with server(step_seconds) as served:
        costs, alone, engine_step_ms, beside = uvloop.run(main(served))
    best = max(costs)
    shared = {
        "protocol": protocol, "batch": NUM_STREAMS, "step_ms": step_seconds * 1e3,
        "gpu": cpu_name(), "load": round(os.getloadavg()[0], 1), "commit": commit(),
        "command": "python -m benchmarks.front_end", "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    rate = {
        "workload": "streamed messages", "unit": "messages/s", "value": round(best.messages),
        "spread": [round(min(costs).messages), round(best.messages)],
        "tokens_per_s": round(best.tokens), "limit": 20_000,
        "cpu_us_per_message": {
            name: round(getattr(best, name), 1) for name in ("front_end", "engine", "client")
        },
    }  # fmt: skip
    firsts = [
        {
            "workload": f"added to the first token, {where}", "unit": "ms", "limit": 3.0,
            "value": round(statistics.median(times), 2),
            "spread": [round(min(times), 2), round(max(times), 2)],
        }
        for where, times in (("alone", alone), (f"beside {NUM_STREAMS // 2} streams", beside))
    ]  # fmt: skip
    # The value is beyond the nominal step; an engine also plans, and its clock is not exact.
    beyond = firsts[0]["value"] + step_seconds * 1e3 - engine_step_ms
    firsts[0] |= {"engine_step_ms": round(engine_step_ms, 2), "beyond_it": round(beyond, 2)}
    return [shared | record for record in (rate, *firsts)]


def main() -> None:
    """Measure and write the records, or be the server that is measured."""
    parser = argparse.ArgumentParser(description="Cost of the front end")
    parser.add_argument("--serve", type=float, help="be a server with steps of so many seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "front_end.json")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        sys.exit(serve(arguments.serve))
    records = []
    for protocol in ("grpc", "http"):
        for step_seconds in STEP_SECONDS:
            records += measure(protocol, step_seconds, arguments.rounds)
            print(json.dumps(records[-3:]), flush=True)
    write_records(arguments.out, records)


if __name__ == "__main__":
    main()

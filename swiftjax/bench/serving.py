"""Load through gRPC or HTTP on a server process of its own: Poisson arrivals (W4), or all of W3.

Tokens in, tokens out, greedy, lengths as in W3. A request's clock starts when it is due, so a
client that falls behind counts against the server. A program that is compiled meanwhile holds up
every answer, so each load of W4 also tells how many there were.
"""

import asyncio
import http.client
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from swiftjax.bench.lengths import Throughput, throughput_lengths
from swiftjax.bench.records import Figure
from swiftjax.bench.serving_clients import Send, open_client
from swiftjax.errors import InvalidRequestError, SwiftJaxError

TTFT_LIMIT, INTERVAL_LIMIT = 0.5, 0.03  # seconds; a request within both counts as good
READY_SECONDS = 300.0
COMPILES = "W4-compiles"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """Where a server listens on this machine."""

    grpc: int
    http: int

    def open_client(self, protocol: str) -> AbstractAsyncContextManager[Send, bool | None]:
        """Open a client of this server."""
        return open_client(protocol, grpc=f"127.0.0.1:{self.grpc}", http=f"127.0.0.1:{self.http}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What the server says of its model."""

    vocab_size: int
    dtype: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One request: seconds from when it was due to its first and last token, and their number."""

    first: float
    last: float
    num_tokens: int

    @property
    def interval(self) -> float:
        """Mean seconds between tokens."""
        return (self.last - self.first) / max(1, self.num_tokens - 1)

    @property
    def is_good(self) -> bool:
        """Whether a user would have called it fast."""
        return self.first <= TTFT_LIMIT and self.interval <= INTERVAL_LIMIT


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(
    flags: Sequence[str], ports: Ports, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Run `swiftjax serve` until the context ends; returns once it is ready."""
    from swiftjax.serving.client import Client

    command = [sys.executable, "-m", "swiftjax.cli", "serve", *flags, "--quiet"]
    command += ["--grpc-port", str(ports.grpc), "--port", str(ports.http)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        _wait_until_ready(server, ports)
        with Client(f"127.0.0.1:{ports.grpc}") as client:
            model = client.get_model()
        yield Served(vocab_size=model.vocab_size, dtype=model.dtype)
    finally:
        server.terminate()
        server.communicate(timeout=60)


def _wait_until_ready(server: "subprocess.Popen[str]", ports: Ports) -> None:
    from swiftjax.errors import NotReadyError
    from swiftjax.serving.client import Client

    deadline = time.monotonic() + READY_SECONDS
    with Client(f"127.0.0.1:{ports.grpc}") as client:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise SwiftJaxError(f"the server ended: {server.communicate()[1].strip()[-500:]}")
            try:
                return client.wait_until_serving(timeout=1.0)
            except (NotReadyError, SwiftJaxError):
                time.sleep(0.2)
    raise SwiftJaxError(f"the server was not ready after {READY_SECONDS:g} s")


def measure(
    ports: Ports,
    protocol: str,
    rate: float | None,
    seconds: float,
    vocab_size: int,
    case: Throughput,
) -> list[Figure]:
    """W4 at a rate of so many requests a second, or W3, which is all at once."""
    if rate is None:
        return [measure_serving_throughput(ports, protocol, vocab_size, case)]
    return measure_serving(ports, protocol, rate, seconds, vocab_size, case)


def measure_serving(
    ports: Ports, protocol: str, rate: float, seconds: float, vocab_size: int, case: Throughput
) -> list[Figure]:
    """Send requests at `rate` a second; medians and 99th percentiles, and the share that was good.

    Spreads are (median, 99th percentile).
    """
    num_before = num_compiles(ports)
    start = time.perf_counter()
    answered = uvloop.run(_load(ports, protocol, rate, seconds, vocab_size, case))
    took = time.perf_counter() - start

    def figure(workload: str, unit: str, values: list[float]) -> Figure:
        median, late = (float(np.percentile(values, q)) for q in (50, 99))
        return Figure(
            workload=workload, batch=len(answered), context=case.prompt_lens[1], unit=unit,
            value=median, spread=(median, late),
        )  # fmt: skip

    good = sum(a.is_good for a in answered) / len(answered)
    tokens = sum(a.num_tokens for a in answered) / took
    return [
        figure("W4-ttft", "ms", [a.first * 1e3 for a in answered]),
        figure("W4-inter-token", "ms", [a.interval * 1e3 for a in answered]),
        figure("W4-good-share", "of requests", [good]),
        figure("W4-tokens", "tokens/s", [tokens]),
        figure(COMPILES, "programs", [num_compiles(ports) - num_before]),
    ]


def num_compiles(ports: Ports) -> float:
    """Programs that the server has compiled since it was ready, as it tells Prometheus."""
    with closing(http.client.HTTPConnection("127.0.0.1", ports.http, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    (line,) = (x for x in text.splitlines() if x.startswith("swiftjax_jit_compiles_total{"))
    return float(line.rpartition(" ")[2])


def measure_serving_throughput(
    ports: Ports, protocol: str, vocab_size: int, case: Throughput, rounds: int = 2
) -> Figure:
    """Output tokens a second of W3, all requests sent at once; best of the rounds."""
    prompt_lens, output_lens = throughput_lengths(case)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in prompt_lens]

    async def run() -> float:
        async with ports.open_client(protocol) as send:

            async def one(prompt: list[int], output_len: int) -> None:
                check_length(output_len, sum([count async for count in send(prompt, output_len)]))

            start = time.perf_counter()
            await asyncio.gather(*map(one, prompts, output_lens))
            return sum(output_lens) / (time.perf_counter() - start)

    rates = [uvloop.run(run()) for _ in range(rounds)]
    return Figure(
        workload="W3-served", batch=case.num_requests, context=case.prompt_lens[1],
        unit="tokens/s", value=max(rates), spread=(max(rates), min(rates)),
    )  # fmt: skip


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Seconds at which requests are due; raises InvalidRequestError when there are none."""
    draw, dues, due = random.Random(seed), [], 0.0
    while (due := due + draw.expovariate(rate)) < seconds:
        dues.append(due)
    if not dues:
        raise InvalidRequestError(
            f"no request arrives at {rate:g} a second within {seconds:g} s: raise one of the two"
        )
    return dues


def check_length(asked: int, num_tokens: int) -> None:
    """Raise SwiftJaxError for an answer that is not of the length that was asked."""
    if num_tokens != asked:
        raise SwiftJaxError(f"an answer of {asked} tokens has {num_tokens}: figures would be wrong")


async def _load(
    ports: Ports, protocol: str, rate: float, seconds: float, vocab_size: int, case: Throughput
) -> list[Answered]:
    dues = arrivals(rate, seconds, case.seed)
    lengths = throughput_lengths(case._replace(num_requests=len(dues)))
    rng = np.random.default_rng(0)
    async with ports.open_client(protocol) as send:
        start = time.perf_counter()

        async def one(due: float, prompt_len: int, output_len: int) -> Answered:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            prompt = rng.integers(0, vocab_size, prompt_len).tolist()
            times, count = [], 0
            async for num_tokens in send(prompt, output_len):
                times.append(time.perf_counter() - start - due)
                count += num_tokens
            check_length(output_len, count)
            return Answered(first=times[0], last=times[-1], num_tokens=count)

        return await asyncio.gather(*map(one, dues, *lengths))

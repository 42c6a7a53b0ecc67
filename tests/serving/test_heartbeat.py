"""An engine process that lives but does not answer: refused calls, then killed and replaced."""

import asyncio
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swiftjax.errors import EngineSilentError, NotReadyError
from swiftjax.serving.client import Client
from swiftjax.serving.engine_watch import EngineWatch
from swiftjax.serving.gate import Gate
from swiftjax.serving.heartbeat import watch_heartbeat
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.served import Served
from tests.serving.harness import PATIENCE, status_of
from tests.serving.harness import wait_until as until
from tests.serving.http.test_process import Server, running
from tests.serving.test_engine_restart import ANSWER, ask, engine_pids, is_gone
from tests.stalls import tried_again_after_stalls


def is_serving(server: Server) -> bool:
    """What grpc.health.v1 and /ready say, which is the same but for a change between the two."""
    with grpc.insecure_channel(server.grpc) as channel, server.client() as web:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        def look() -> tuple[bool, bool]:
            status = stub.Check(health_pb2.HealthCheckRequest()).status
            ready = web.get("/ready")
            assert ready.status_code == 200 or ready.headers["retry-after"] == "1"
            return status == health_pb2.HealthCheckResponse.SERVING, ready.status_code == 200

        is_well, is_ready = look()
        if is_well != is_ready:
            is_well, is_ready = look()
    assert is_ready == is_well
    return is_well


async def refusal_of(server: Server) -> tuple[grpc.StatusCode, str, object]:
    """Status, text and retry hint that a gRPC call gets, without the client's own retries."""
    options = [("grpc.enable_retries", 0)]
    async with grpc.aio.insecure_channel(server.grpc, options) as channel:
        call: Any = pb_grpc.GenerationServiceStub(channel).GetModel(pb.GetModelRequest())
        status, details = await status_of(call)
        return status, details, dict(await call.trailing_metadata()).get("grpc-retry-pushback-ms")


@tried_again_after_stalls
def test_a_stopped_engine_is_not_serving_until_it_goes_on() -> None:
    with running("--apart", "--max-silent-seconds", 0.6) as server, Client(server.grpc) as client:
        until(lambda: engine_pids(server))
        time.sleep(0.9)  # idle for longer than it may be silent
        assert is_serving(server)
        with ThreadPoolExecutor(1) as pool, server.client() as web:
            answer = pool.submit(ask, client)
            ask(client, 2)  # by now it runs
            os.kill(engine_pids(server)[0], signal.SIGSTOP)
            until(lambda: not is_serving(server), 1.2)
            refused = web.post("/v1/completions", json={"prompt": " "})
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "engine_silent"
            assert web.get("/health").status_code == 200
            status, details, pushback = asyncio.run(refusal_of(server))
            assert status == grpc.StatusCode.UNAVAILABLE and "does not answer" in details
            assert pushback == "1000"
            os.kill(engine_pids(server)[0], signal.SIGCONT)
            until(lambda: is_serving(server), 1.0)
            assert answer.result() == ANSWER  # nothing was lost
        assert len(engine_pids(server)) == 1


@tried_again_after_stalls
def test_p5_an_engine_that_stays_silent_is_killed_and_replaced() -> None:
    # The client asks three times, which takes it a third of a second: engines are slower.
    args = (
        "--apart", "--max-restarts", 2, "--max-silent-seconds", 0.4, "--hang-after", 20,
        "--load-seconds", 2,
    )  # fmt: skip
    with running(*args) as server, Client(server.grpc) as client, server.client() as web:
        until(lambda: engine_pids(server))
        with ThreadPoolExecutor(1) as pool:
            for num_engines, count in (1, 4000), (2, 10):
                client.wait_until_serving(PATIENCE)
                if num_engines == 2:  # stopped before its step hangs
                    os.kill(engine_pids(server)[1], signal.SIGSTOP)
                with pytest.raises(NotReadyError, match=r"SIGKILL|started again"):
                    pool.submit(ask, client, count).result(3.0)
                assert is_gone(engine_pids(server)[num_engines - 1])
        client.wait_until_serving(PATIENCE)
        assert ask(client, 10) == ANSWER[:10]
        assert len(engine_pids(server)) == 3
        samples = web.get("/metrics").text
        assert re.search(r"swiftjax_engine_restarts_total\{.*\} 2\.0", samples)
        assert "".join(server._errors).count("has not answered for 0.8 s and is killed") == 2


class FakePulse:
    """Answers a ping by what the test says."""

    def __init__(self, watch: EngineWatch) -> None:
        self.watch = watch
        self.answers = True
        self.num_pings = 0
        self.is_killed = False

    def ping(self) -> None:
        """Answer, or not."""
        self.num_pings += 1
        if self.answers:
            self.watch.take(None)

    def kill(self) -> None:
        """Remember it."""
        self.is_killed = True


def test_time_for_which_the_front_end_did_not_run_is_no_silence() -> None:
    async def main() -> None:
        watch, told = EngineWatch(), list[bool]()

        async def suspend(is_silent: bool) -> None:
            told.append(is_silent)

        pulse = FakePulse(watch)
        served = Served(cast(Any, None), pb.GetModelResponse(), watch, pulse=pulse)
        watching = asyncio.create_task(watch_heartbeat(served, 0.2, suspend))
        await asyncio.sleep(0.1)
        pulse.answers = False
        time.sleep(0.5)  # this process was stopped, or had no CPU
        pulse.answers = True
        await asyncio.sleep(0.3)
        assert not told and not watching.done()
        pulse.answers = False
        await asyncio.wait_for(watching, PATIENCE)
        assert told == [True] and pulse.is_killed

    asyncio.run(main())


def test_a_silent_engine_stays_shut_whatever_opens_the_gate() -> None:
    gate = Gate()
    gate.suspend(True)
    gate.open()
    with pytest.raises(EngineSilentError, match="does not answer"), gate.passing():
        pass
    gate.suspend(False)
    with gate.passing():
        assert gate.is_open

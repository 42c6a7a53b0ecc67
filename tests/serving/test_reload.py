"""ReloadModel over gRPC: what fits replaces the weights between calls, else nothing changes."""

import asyncio
import os
import signal

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import DeadlineError
from swiftjax.serving.client import Client
from swiftjax.serving.gate import Gate
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.reloading import Reloading
from swiftjax.serving.served import Served
from tests.serving.harness import PATIENCE, make_core, make_engine, serving, status_of
from tests.serving.harness import wait_until as until
from tests.serving.http.test_process import running
from tests.serving.test_engine_restart import ask, engine_pids


def reload(
    channel: grpc.Channel, path: str, seconds: float = 10.0
) -> pb.GetModelResponse | tuple[grpc.StatusCode, str]:
    """The model that is served then, or why not."""
    timeout = Duration(nanos=int(seconds * 1e9) % 10**9, seconds=int(seconds))
    request = pb.ReloadModelRequest(path=path, drain_timeout=timeout)
    try:
        return pb_grpc.AdminServiceStub(channel).ReloadModel(request).model
    except grpc.RpcError as error:
        return error.code(), error.details()


def test_weights_change_between_calls_and_stay_changed_after_a_restart() -> None:
    with (
        running("--apart", "--max-restarts", 1) as server,
        Client(server.grpc) as client,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        assert ask(client, 4) == '!"#$'
        assert client.get_model().version == "bytes:1"
        code, details = reload(channel, "broken")
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "tensor head of broken" in details

        long = client.generate(text=" ", config=GenerationConfig(max_new_tokens=150))
        first = next(long).text
        code, details = reload(channel, "doubled", 0.1)
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED and "nothing was changed" in details
        assert ask(client, 4) == '!"#$'  # as if nobody had asked
        model = reload(channel, "doubled")  # waits for the long one
        rest = "".join(delta.text for delta in long)
        assert [ord(c) for c in (first + rest)[:90]] == list(range(33, 123))
        assert (model.name, model.version) == ("bytes", "doubled:2")
        assert client.get_model() == model
        assert ask(client, 4) == '"$&('

        os.kill(engine_pids(server)[0], signal.SIGKILL)
        until(lambda: len(engine_pids(server)) == 2)
        client.wait_until_serving(PATIENCE)
        assert ask(client, 4) == '"$&('
        assert reload(channel, "").version == "doubled:3"
        with server.client() as web:
            assert 'version="doubled:3"' in web.get("/metrics").text


def test_drained_servers_and_those_that_cannot_change_say_so() -> None:
    async def main() -> None:
        async with serving(make_core()) as service:
            admin = pb_grpc.AdminServiceStub(service.channel)
            code, details = await status_of(admin.ReloadModel(pb.ReloadModelRequest(path="x")))
            assert code == grpc.StatusCode.UNIMPLEMENTED and "start another" in details
            bad = pb.ReloadModelRequest(path="x", drain_timeout=Duration(seconds=-1))
            code, _ = await status_of(admin.ReloadModel(bad))
            assert code == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())
    with running("--apart") as server, grpc.insecure_channel(server.grpc) as channel:
        pb_grpc.AdminServiceStub(channel).Drain(pb.DrainRequest())
        code, details = reload(channel, "doubled")
        assert code == grpc.StatusCode.UNAVAILABLE and "no new calls" in details


class FakeWeights:
    """Anything can be read, and nothing changes."""

    async def read(self, path: str) -> None:
        """Take any."""

    def __init__(self) -> None:
        self.is_forgotten = False

    def forget(self) -> None:
        """Remember that."""
        self.is_forgotten = True

    async def use(self) -> pb.GetModelResponse:
        """Change nothing."""
        return pb.GetModelResponse()


def test_a_dead_engine_is_not_put_before_calls_again() -> None:
    async def main() -> None:
        opened: list[Served] = []

        async def drain(reason: str, seconds: float) -> bool:
            await engine.close()  # another one is being loaded from here on
            return False

        async def put(served: Served) -> None:
            opened.append(served)

        engine, gate, weights = make_engine(make_core()), Gate(), FakeWeights()
        gate.open()
        served = Served(engine=engine, model=pb.GetModelResponse(), weights=weights)
        with pytest.raises(DeadlineError):
            await Reloading(gate, drain, put).run(served, "x", 0.0)
        assert not opened and weights.is_forgotten

    asyncio.run(main())

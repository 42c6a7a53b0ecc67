"""A whole gRPC server in this process, over a runner whose tokens can be computed by hand.

Token ids are byte values, and FakeRunner counts up: the prompt "a" is answered with "bcdef...".
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from swiftjax.config import ReaderLimits, SessionLimits
from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.core import EngineCore
from swiftjax.engine.engine_link import ThreadLink
from swiftjax.engine.kept_pages import KeptLimits
from swiftjax.engine.step_meter import StepReport
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.memory import DeviceReport
from swiftjax.model_config import ModelConfig
from swiftjax.serving.grpc_server import GrpcServer
from swiftjax.serving.messages import describe_model
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.served import Served
from swiftjax.serving.session_files import SessionFiles
from swiftjax.tokenizer_files import TokenizerFiles
from tests.fakes import FakeRunner, make_fake_core

END_ID = 256
LONG_ID = 257  # a token that writes LONG_TEXT
LONG_TEXT = "☃" * 84
VOCAB_SIZE = 258
# Seconds to wait for what must come, but has no hurry: a machine may stand still.
PATIENCE = 60.0
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"


def byte_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """One token per byte, its id the byte's value; then END_ID and LONG_ID."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # How byte-level tokenizers write bytes that are no visible character.
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }
    backend = tokenizers.Tokenizer(models.BPE({letters[b]: b for b in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.add_tokens([LONG_TEXT])
    files = TokenizerFiles(
        tokenizer_json=json.dumps(json.loads(backend.to_str())),
        config={"eos_token": "<end>"},
        chat_template=template,
    )
    return Tokenizer(files)


def make_core(
    *,
    delay: float = 0.0,
    max_num_seqs: int = 4,
    max_queue_len: int = 64,
    max_model_len: int = 4096,
    num_pages: int = 4096,
    policy: str = "fcfs",
    min_batch_size: int = 1,
    max_wait: float = 0.0,
    overlaps: bool = False,
    streams: bool = False,
) -> EngineCore:
    """A core for the byte vocabulary."""
    return make_fake_core(
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(END_ID,),
        delay=delay,
        max_num_seqs=max_num_seqs,
        max_queue_len=max_queue_len,
        max_model_len=max_model_len,
        num_pages=num_pages,
        max_num_batched_tokens=256,
        policy=policy,
        min_batch_size=min_batch_size,
        max_wait=max_wait,
        overlaps=overlaps,
        streams=streams,
        kept=KeptLimits(1000, 1000),
    )


MODEL = ModelConfig(
    family="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position=4096,
    bos_token_id=None,
    eos_token_ids=(END_ID,),
    dtype="float32",
)


def make_engine(
    core: EngineCore,
    readers: ReaderLimits | None = None,
    watch: Callable[[StepReport | None], None] | None = None,
    devices: DeviceReport | None = None,
    sessions: SessionLimits | None = None,
) -> AsyncEngine:
    """An AsyncEngine over a thread that steps this core; its devices say always the same."""
    inspect = None if devices is None else (lambda: devices)
    link = ThreadLink(core, inspect)
    return AsyncEngine(link, byte_tokenizer(), core.limits, readers, watch, sessions)


@dataclass
class Service:
    """A server that answers, and the client's side of it."""

    core: EngineCore
    engine: AsyncEngine
    server: GrpcServer
    channel: grpc.aio.Channel
    stub: pb_grpc.GenerationServiceStub

    @property
    def num_steps(self) -> int:
        """Steps computed so far."""
        return len(cast(FakeRunner, self.core._runner).batches)

    def is_idle(self) -> bool:
        """Whether nothing runs or waits and every page is free."""
        stats = self.engine.stats()
        no_requests = stats.num_running == 0 and stats.num_waiting == 0
        return no_requests and stats.num_free_pages == stats.num_pages


@asynccontextmanager
async def serving(
    core: EngineCore, readers: ReaderLimits | None = None, session_folder: Path | None = None
) -> AsyncIterator[Service]:
    """Run a server on a free port, with a default client connected."""
    engine = make_engine(core, readers)
    server = GrpcServer("127.0.0.1", 0)
    await server.start()
    model = describe_model("bytes", MODEL, core.limits, engine.tokenizer)
    await server.open(
        Served(engine, model, session_files=session_folder and SessionFiles(session_folder))
    )
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            yield Service(core, engine, server, channel, stub)
    finally:
        await server.stop()
        await engine.close()
        if engine.is_alive is False and core.has_work is False:
            core.scheduler.check_integrity()


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for a condition; fail when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Do the same where there is no event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def long_request(**fields: object) -> pb.GenerateRequest:
    """A request that goes on for 4000 tokens unless it is stopped."""
    stop = pb.StopOptions(max_new_tokens=4000, ignore_eos=True)
    return pb.GenerateRequest(text="a", stop=stop, **fields)  # type: ignore[arg-type]


async def join(
    call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]",
) -> tuple[str, pb.GenerateResponse]:
    """The whole text of an answer and its last message."""
    messages = [message async for message in call]
    assert all(not m.finish_reason and not m.HasField("usage") for m in messages[:-1])
    return "".join(m.text for m in messages), messages[-1]


async def status_of(call: object) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with, after reading whatever it sends."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:  # type: ignore[attr-defined]
                pass
        else:
            await call  # type: ignore[misc]
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""

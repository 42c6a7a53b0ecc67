"""`swiftjax chat`: a conversation in the terminal, or over a pipe."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from swiftjax.cli import options as opt
from swiftjax.cli.listening import KEYS_VARIABLE
from swiftjax.cli.loading import load_core, read_chat_template
from swiftjax.cli.reporting import print_line
from swiftjax.config import EngineConfig
from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import InvalidRequestError

if TYPE_CHECKING:
    from swiftjax.engine.async_engine import AsyncEngine
    from swiftjax.engine.async_session import AsyncSession

Turns = list[dict[str, str]]
Ask = Callable[[Turns], AsyncGenerator[str, None]]

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"

System = Annotated[
    str | None,
    typer.Option(help="The system message.", show_default="the template's own, if any"),
]


Server = Annotated[
    str | None,
    typer.Option(
        help="Talk to a server at this address (HOST:PORT of its gRPC port) instead of loading "
        f"MODEL. Its API key, if it has any, is the first of {KEYS_VARIABLE}.",
        show_default="none",
    ),
]
Model = Annotated[
    str | None,
    typer.Argument(help=opt.MODEL_HELP, show_default="none; needed without --server"),
]


def chat(
    model: Model = None,
    server: Server = None,
    system: System = None,
    max_new_tokens: opt.MaxNewTokens = 512,
    temperature: opt.Temperature = opt.DEFAULTS.temperature,
    top_p: opt.TopP = opt.DEFAULTS.top_p,
    top_k: opt.TopK = opt.DEFAULTS.top_k,
    seed: opt.Seed = None,
    streaming_window: opt.StreamingWindow = None,
    streaming_sink: opt.StreamingSink = opt.STREAMING_DEFAULTS.sink,
    chat_template: opt.ChatTemplate = None,
    dtype: opt.DtypeOption = None,
    quant_type: opt.QuantTypeOption = None,
    kv_cache_dtype: opt.KVCacheDtypeOption = "auto",
    max_model_len: opt.MaxModelLen = None,
    gpu_memory_utilization: opt.GpuMemoryUtilization = opt.ENGINE_DEFAULTS.gpu_memory_utilization,
    implementation: opt.Implementation = None,
    quiet: opt.Quiet = False,
) -> None:
    """Talk to a model, or to a server.

    /reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer. Piped stdin is taken as one
    message per line.
    """
    generation = GenerationConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        streaming=opt.streaming(streaming_window, streaming_sink),
    )
    if (model is None) == (server is None):
        raise InvalidRequestError("give one of MODEL and --server")
    if server is not None:
        _ask_server(server, generation, system)
        return
    config = EngineConfig(
        model_path=str(model),
        dtype=dtype,
        quantization=opt.quantization(quant_type),
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_batch_size=1,
        gpu_memory_utilization=gpu_memory_utilization,
        implementation=implementation,
        streaming=streaming_window is not None,
        chat_template=read_chat_template(chat_template),
    )
    engine = _start(config, quiet)
    ask = (_in_full if generation.streaming is None else _endlessly)(engine, generation)
    with asyncio.Runner() as runner:
        try:
            _converse(runner, ask, system)
        finally:
            runner.run(engine.close())


def _in_full(engine: "AsyncEngine", generation: GenerationConfig) -> Ask:
    """Every turn is a request for the whole conversation."""

    async def answer(turns: Turns) -> AsyncGenerator[str, None]:
        async for output in engine.stream(engine.tokenizer.apply_chat_template(turns), generation):
            yield output.text

    return answer


def _endlessly(engine: "AsyncEngine", generation: GenerationConfig) -> Ask:
    """Ask in a session, which keeps what was computed of a chat of any length."""
    session: AsyncSession | None = None

    async def answer(turns: Turns) -> AsyncGenerator[str, None]:
        nonlocal session
        new = turns[-1:]
        if session is None or not any(turn["role"] == "assistant" for turn in turns):
            if session is not None:
                session.close()
            session = engine.sessions.open(streaming=generation.streaming, seed=generation.seed)
            new = turns
        async with aclosing(session.stream(generation, content=new)) as outputs:
            async for output in outputs:
                yield output.text

    return answer


def _ask_server(address: str, generation: GenerationConfig, system: str | None) -> None:
    from swiftjax.serving.async_client import AsyncClient

    key = os.environ.get(KEYS_VARIABLE, "").partition(",")[0].strip() or None
    with asyncio.Runner() as runner:

        async def connect() -> AsyncClient:
            return AsyncClient(address, api_key=key)

        client = runner.run(connect())

        async def answer(turns: Turns) -> AsyncGenerator[str, None]:
            async for delta in client.generate(messages=turns, config=generation):
                yield delta.text

        try:
            _converse(runner, answer, system)
        finally:
            runner.run(client.close())


def _start(config: EngineConfig, quiet: bool) -> "AsyncEngine":
    built = load_core(config, warm=True, quiet=quiet)
    from swiftjax.engine.async_engine import AsyncEngine
    from swiftjax.engine.engine_link import ThreadLink

    return AsyncEngine(ThreadLink(built.core), built.tokenizer, built.core.limits)


def _converse(runner: asyncio.Runner, ask: Ask, system: str | None) -> None:
    start = [] if system is None else [{"role": "system", "content": system}]
    turns = list(start)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print_line(HELP)
    for line in _lines(is_terminal):
        if line == "/exit":
            return
        if line == "/reset":
            turns = list(start)
            continue
        turns.append({"role": "user", "content": line})
        answer: list[str] = []
        try:
            runner.run(_answer(ask, turns, answer))
        except InvalidRequestError as error:
            if not is_terminal:
                raise
            print_line(f"{error} (/reset starts over)")
            turns.pop()
            continue
        except KeyboardInterrupt:
            if not is_terminal:
                raise
        print(flush=True)
        turns.append({"role": "assistant", "content": "".join(answer)})


async def _answer(ask: Ask, turns: Turns, answer: list[str]) -> None:
    """Print the answer as it comes; `answer` keeps what there is, however this ends."""
    async with aclosing(ask(turns)) as texts:
        async for text in texts:
            answer.append(text)
            print(text, end="", flush=True)


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yield what the user says, without blank lines, until the end of the input."""
    if is_terminal:
        import readline  # noqa: F401  importing it gives input() editing and a history
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            # Often meant for an answer that has just ended.
            print_line(HELP)
            continue
        if line:
            yield line

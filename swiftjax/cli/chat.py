"""`swiftjax chat`: a conversation in the terminal, or over a pipe."""

import asyncio
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from swiftjax.cli import options as opt
from swiftjax.cli.loading import load_core, read_chat_template
from swiftjax.cli.reporting import print_line
from swiftjax.config import EngineConfig
from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import InvalidRequestError

if TYPE_CHECKING:
    from swiftjax.engine.async_engine import AsyncEngine

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"

System = Annotated[
    str | None,
    typer.Option(help="The system message.", show_default="the template's own, if any"),
]


def chat(
    model: opt.Model,
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
    max_model_len: opt.MaxModelLen = None,
    gpu_memory_utilization: opt.GpuMemoryUtilization = opt.ENGINE_DEFAULTS.gpu_memory_utilization,
    implementation: opt.Implementation = None,
    quiet: opt.Quiet = False,
) -> None:
    """Talk to a model.

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
    config = EngineConfig(
        model_path=model,
        dtype=dtype,
        quantization=opt.quantization(quant_type),
        max_model_len=max_model_len,
        max_batch_size=1,
        gpu_memory_utilization=gpu_memory_utilization,
        implementation=implementation,
        streaming=streaming_window is not None,
        chat_template=read_chat_template(chat_template),
    )
    engine = _start(config, quiet)
    with asyncio.Runner() as runner:
        try:
            _converse(runner, engine, generation, system)
        finally:
            runner.run(engine.close())


def _start(config: EngineConfig, quiet: bool) -> "AsyncEngine":
    built = load_core(config, warm=True, quiet=quiet)
    from swiftjax.engine.async_engine import AsyncEngine, ThreadLink

    return AsyncEngine(ThreadLink(built.core), built.tokenizer, built.core.limits)


def _converse(
    runner: asyncio.Runner, engine: "AsyncEngine", config: GenerationConfig, system: str | None
) -> None:
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
            runner.run(_answer(engine, config, turns, answer))
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


async def _answer(
    engine: "AsyncEngine", config: GenerationConfig, turns: list[dict[str, str]], answer: list[str]
) -> None:
    """Print the answer as it comes; `answer` keeps what there is, however this ends."""
    prompt = engine.tokenizer.apply_chat_template(turns)
    async for output in engine.stream(prompt, config):
        answer.append(output.text)
        print(output.text, end="", flush=True)


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

"""`swiftjax generate`: answer prompts given as arguments or on stdin."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from swiftjax.cli import options as opt
from swiftjax.cli.loading import load_core
from swiftjax.config import EngineConfig
from swiftjax.engine.request import GenerationConfig, RequestOptions
from swiftjax.errors import InvalidRequestError

if TYPE_CHECKING:
    from swiftjax.engine.request import Choice, Prompt, RequestOutput

Prompts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT", help="Answered together.", show_default="stdin, as one prompt"
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; can be given several times.", show_default="none"),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(help="End at this token; can be given several times.", show_default="none"),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Go on after end-of-sequence.", show_default="off"),
]
MinNewTokens = Annotated[int, typer.Option(help="End at no stop token before this many.")]
NumChoices = Annotated[int, typer.Option("-n", help="Answers per prompt, up to 16.")]
Logprobs = Annotated[
    int | None,
    typer.Option(help="With --json: this many most likely tokens each.", show_default="none"),
]
PromptLogprobs = Annotated[
    int | None, typer.Option(help="The same for the prompt's tokens.", show_default="none")
]
Echo = Annotated[bool, typer.Option("--echo", help="Print the prompt too.", show_default="off")]
TimeLimit = Annotated[
    float | None,
    typer.Option(help="End with what there is after so many seconds.", show_default="none"),
]
TokenIds = Annotated[
    bool,
    typer.Option("--token-ids", help="Prompts are token ids, like '1 2 3'.", show_default="off"),
]


def generate(
    model: opt.Model,
    prompt: Prompts = None,
    max_new_tokens: opt.MaxNewTokens = 256,
    temperature: opt.Temperature = opt.DEFAULTS.temperature,
    top_p: opt.TopP = opt.DEFAULTS.top_p,
    top_k: opt.TopK = opt.DEFAULTS.top_k,
    min_p: opt.MinP = opt.DEFAULTS.min_p,
    typical_p: opt.TypicalP = opt.DEFAULTS.typical_p,
    repetition_penalty: opt.RepetitionPenalty = opt.DEFAULTS.repetition_penalty,
    presence_penalty: opt.PresencePenalty = opt.DEFAULTS.presence_penalty,
    frequency_penalty: opt.FrequencyPenalty = opt.DEFAULTS.frequency_penalty,
    seed: opt.Seed = None,
    min_new_tokens: MinNewTokens = opt.DEFAULTS.min_new_tokens,
    n: NumChoices = opt.DEFAULTS.n,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    echo: Echo = False,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    time_limit: TimeLimit = None,
    token_ids: TokenIds = False,
    streaming_window: opt.StreamingWindow = None,
    streaming_sink: opt.StreamingSink = opt.STREAMING_DEFAULTS.sink,
    dtype: opt.DtypeOption = None,
    quant_type: opt.QuantTypeOption = None,
    kv_cache_dtype: opt.KVCacheDtypeOption = "auto",
    gpu_memory_utilization: opt.GpuMemoryUtilization = opt.ENGINE_DEFAULTS.gpu_memory_utilization,
    implementation: opt.Implementation = None,
    no_prefix_cache: opt.NoPrefixCache = False,
    deterministic: opt.Deterministic = False,
    trace: opt.Trace = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Continue prompts, taken as they stand ('chat' applies the chat template), and print them."""
    generation = GenerationConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        min_new_tokens=min_new_tokens,
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        streaming=opt.streaming(streaming_window, streaming_sink),
    )
    prompts = _read_prompts(prompt, token_ids)
    config = EngineConfig(
        model_path=model,
        dtype=dtype,
        quantization=opt.quantization(quant_type),
        kv_cache_dtype=kv_cache_dtype,
        gpu_memory_utilization=gpu_memory_utilization,
        implementation=implementation,
        streaming=streaming_window is not None,
        group_prompts=True,
        prefix_cache=not no_prefix_cache,
        deterministic=deterministic,
        trace=trace,
    )
    options = RequestOptions(time_limit=time_limit)
    for output in _answer(config, prompts, generation, options, quiet):
        for choice in output.choices:
            print(_to_json(output, choice) if as_json else choice.text, flush=True)


def _read_prompts(given: list[str] | None, token_ids: bool) -> "list[Prompt]":
    texts = given or [_read_stdin()]
    return [_parse_ids(text) for text in texts] if token_ids else [*texts]


def _answer(
    config: EngineConfig,
    prompts: "list[Prompt]",
    generation: GenerationConfig,
    options: RequestOptions,
    quiet: bool,
) -> "list[RequestOutput]":
    built = load_core(config, warm=False, quiet=quiet)
    from swiftjax.api import Engine

    return Engine.from_core(built).generate(prompts, generation, options=options)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise InvalidRequestError("no prompt: give one as an argument or on stdin")
    return sys.stdin.read().removesuffix("\n")


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequestError(
            f"{text!r:.80} is not a list of token ids; write them as '1 2 3'"
        ) from None


def _to_json(output: "RequestOutput", choice: "Choice") -> str:
    return json.dumps(
        {
            "request_id": output.request_id,
            "index": choice.index,
            "text": choice.text,
            "token_ids": choice.token_ids,
            "logprobs": choice.logprobs,
            "top_logprobs": choice.top_logprobs,
            "prompt_logprobs": output.prompt._asdict() if output.prompt else None,
            "finish_reason": choice.finish_reason,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_cached_tokens": output.num_cached_tokens,
            "first_token_seconds": output.timings.first_token,
            "total_seconds": output.timings.total,
        },
        ensure_ascii=False,
    )

"""Arguments and options that several commands take, each written once."""

from pathlib import Path
from typing import Annotated

import typer

from swiftjax.config import (
    QUEUE_POLICY_NAMES,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    PromptAttention,
    VictimPolicyName,
)
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.streaming import Streaming as StreamingConfig
from swiftjax.model_config import Dtype
from swiftjax.quantization import Quantization, QuantType

DEFAULTS = GenerationConfig()
ENGINE_DEFAULTS = EngineConfig(model_path="")
STREAMING_DEFAULTS = StreamingConfig()

MODEL_HELP = "A Hugging Face directory, a GGUF file, a native checkpoint, or 'smollm2-135m'."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help="Type of weights, activations and KV cache.", show_default="as in the checkpoint"
    ),
]
QuantTypeOption = Annotated[
    QuantType | None,
    typer.Option(
        help="Round the weights to fewer bits while loading; int4 in groups of 128.",
        show_default="as in the checkpoint",
    ),
]
KVCacheDtypeOption = Annotated[
    KVCacheDtype,
    typer.Option(help="Type of the KV cache; int8 and fp8 hold about twice as many tokens."),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Longest prompt plus answer, in tokens.", show_default="the model's own"),
]
# Both spellings wherever a model runs: servers are known for the one, engines for the other.
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs",
        "--max-batch-size",
        help="Most requests in one step.",
        show_default="64 on a GPU, 8 on a CPU",
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(help="Most tokens in one step.", show_default="2048 on a GPU, 512 on a CPU"),
]
MaxTotalTokenNum = Annotated[
    int | None,
    typer.Option(help="Size of the KV cache, in tokens.", show_default="what fits in memory"),
]
GpuMemoryUtilization = Annotated[
    float, typer.Option(help="Share of the GPU's memory to use, in (0, 1].")
]
PageSize = Annotated[
    int | None, typer.Option(help="Tokens in a KV page.", show_default="64 on a GPU, 16 on a CPU")
]
Implementation = Annotated[
    str | None,
    typer.Option(
        help="Code that computes attention; 'swiftjax doctor' lists them.",
        show_default="the fastest for the device",
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(help="A file with a Jinja chat template.", show_default="the checkpoint's own"),
]
_POLICY_HELP = (
    f"Which waiting request starts first: {', '.join(QUEUE_POLICY_NAMES)}, or "
    "path/to/file.py:function; docs/scheduler.md."
)
# As it was written, for whoever hands it on to another process.
PolicyText = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY", help=_POLICY_HELP, show_default="fair where there are API keys, else fcfs"
    ),
]
VictimPolicy = Annotated[
    VictimPolicyName | None,
    typer.Option(
        help="Which running request gives way when the KV cache is full.",
        show_default="least-important under the priority policy, else newest",
    ),
]
LoadFormatOption = Annotated[
    LoadFormat,
    typer.Option(
        help="'dummy' makes random weights; MODEL is then a shape such as llama3-8b or a directory."
    ),
]
PromptAttentionOption = Annotated[
    PromptAttention,
    typer.Option(
        "--prompt-attention",
        help="What attends over a prompt that fills the largest step alone, none of it cached: "
        "'cudnn' is for bf16 and fp16 models without windows.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Answers equal bit for bit in any company, for some speed; docs/architecture.md.",
        show_default="off",
    ),
]
Streaming = Annotated[
    bool,
    typer.Option(
        "--streaming",
        help="Let requests ask for endless text in constant memory; docs/streaming.md.",
        show_default="off",
    ),
]
StreamingWindow = Annotated[
    int | None,
    typer.Option(
        help="Attend so many last tokens only, and texts may be endless; docs/streaming.md.",
        show_default="off",
    ),
]
StreamingSink = Annotated[
    int, typer.Option(help="With --streaming-window: first tokens that stay attended.")
]
GroupPrompts = Annotated[
    bool,
    typer.Option(
        "--group-prompts/--no-group-prompts",
        help="Have requests and running answers wait for prompts that fill whole steps: many are "
        "done sooner, single ones stand still at times; docs/scheduler.md.",
    ),
]
NoPrefixCache = Annotated[
    bool,
    typer.Option(
        "--no-prefix-cache",
        help="Compute every prompt in full instead of reusing pages of equal prefixes.",
        show_default="off: reuse",
    ),
]
SwapSpaceGib = Annotated[
    float,
    typer.Option(help="Host memory for the pages of preempted requests, in GiB; 0 recomputes."),
]
Trace = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Record what the scheduler decides, without any text, for 'swiftjax replay'.",
        show_default="off",
    ),
]

MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token each time.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")]
TopK = Annotated[int, typer.Option(help="Keep this many of the most likely tokens; 0 keeps all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")]
TypicalP = Annotated[float, typer.Option(help="Keep tokens of typical surprise, up to this.")]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 weakens tokens of the prompt and the answer.")
]
PresencePenalty = Annotated[float, typer.Option(help="Weakens tokens that the answer has.")]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, once per use.")]
Seed = Annotated[
    int | None,
    typer.Option(help="The same seed gives the same answer.", show_default="a fresh one"),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout.", show_default="off")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.", show_default="off")]


def streaming(window: int | None, sink: int) -> StreamingConfig | None:
    """What --streaming-window and --streaming-sink ask of a request."""
    return None if window is None else StreamingConfig(sink=sink, window=window)


def quantization(quant_type: QuantType | None) -> Quantization | None:
    """What --quant-type asks of an engine."""
    return None if quant_type is None else Quantization(kind=quant_type)

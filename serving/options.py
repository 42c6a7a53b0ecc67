"""Generation options and log-probabilities between proto messages and our values, both ways.

Lists are counted before they are copied. No I/O, no engine; used by server and client.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from swiftjax.engine.checks import check_count
from swiftjax.engine.constraint import MAX_CHOICES as MAX_CHOICE_TEXTS
from swiftjax.engine.constraint import Constraint
from swiftjax.engine.generation import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BANNED_IDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from swiftjax.engine.request import GenerationConfig, RequestOptions, TopLogprobs
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError
from swiftjax.serving.proto import swiftjax_pb2 as pb

DEFAULTS = GenerationConfig()
_SCALARS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "n",
)  # fmt: skip
_LABELS = ("priority", "client_id", "session_id", "cache_salt")


class TokenScore(NamedTuple):
    """A token's log-probability (None for the first of a prompt) and the most likely tokens."""

    logprob: float | None
    top: TopLogprobs


def read_generation_config(request: pb.GenerateRequest) -> GenerationConfig:
    """Read all options; raises InvalidRequestError for a value out of range."""
    sampling, stop, output = request.sampling, request.stop, request.output
    _check_counts(sampling, stop)
    if output.logprobs_mode not in pb.LogprobsMode.values():
        raise InvalidRequestError(
            f"logprobs_mode is {output.logprobs_mode}; choose one of "
            f"{', '.join(pb.LogprobsMode.keys())}"
        )
    processed = output.logprobs_mode == pb.LOGPROBS_MODE_PROCESSED
    return GenerationConfig(
        **{name: _given(sampling, name, getattr(DEFAULTS, name)) for name in _SCALARS},
        logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids) or None,
        banned_token_ids=tuple(sampling.banned_token_ids),
        bad_words_ids=tuple(tuple(word.ids) for word in sampling.bad_words),
        max_new_tokens=_given(stop, "max_new_tokens", DEFAULTS.max_new_tokens),
        min_new_tokens=_given(stop, "min_new_tokens", DEFAULTS.min_new_tokens),
        stop=tuple(stop.strings),
        stop_token_ids=tuple(stop.token_ids),
        include_stop_str=_given(stop, "include_stop_string", DEFAULTS.include_stop_str),
        ignore_eos=_given(stop, "ignore_eos", DEFAULTS.ignore_eos),
        logprobs=_given(output, "logprobs", None),
        prompt_logprobs=_given(output, "prompt_logprobs", None),
        logprobs_mode="processed" if processed else "raw",
        echo=output.echo,
        constraint=_read_constraint(request.constraint),
        streaming=read_streaming(request.streaming) if request.HasField("streaming") else None,
    )


def read_streaming(asked: pb.StreamingOptions) -> Streaming:
    """Read sinks and window; raises InvalidRequestError for a value out of range."""
    default, names = Streaming(), ("sink", "window", "buffer")
    return Streaming(**{name: _given(asked, name, getattr(default, name)) for name in names})


def read_request_options(request: pb.GenerateRequest) -> RequestOptions:
    """Read who asks and how urgently; raises InvalidRequestError for a value out of range."""
    limit = None
    if request.HasField("time_limit"):
        limit = read_duration("time_limit", request.time_limit)
    return RequestOptions(**{name: getattr(request, name) for name in _LABELS}, time_limit=limit)


def read_duration(name: str, duration: Duration) -> float:
    """Read a field of that name in seconds; raises InvalidRequestError for a malformed one."""
    seconds, nanos = duration.seconds, duration.nanos
    if abs(nanos) >= 10**9 or seconds * nanos < 0:
        raise InvalidRequestError(
            f"{name} has {seconds} seconds and {nanos} nanos; nanos must lie between -1e9 and "
            "1e9 and have the sign of the seconds"
        )
    return seconds + nanos / 1e9


def _read_constraint(message: pb.Constraint) -> Constraint | None:
    match kind := message.WhichOneof("kind"):
        case "json_schema" | "regex" | "grammar":
            return Constraint(kind=kind, text=getattr(message, kind))
        case "choice":
            check_count("choices", len(message.choice.texts), MAX_CHOICE_TEXTS)
            return Constraint(kind="choice", choices=tuple(message.choice.texts))
        case "json_object" if message.json_object:
            return Constraint(kind="json_object")
    return None


def _write_constraint(constraint: Constraint) -> pb.Constraint:
    match constraint.kind:
        case "choice":
            return pb.Constraint(choice=pb.Choices(texts=constraint.choices))
        case "json_object":
            return pb.Constraint(json_object=True)
        case "json_schema":
            return pb.Constraint(json_schema=constraint.text)
        case "regex":
            return pb.Constraint(regex=constraint.text)
        case "grammar" | "tool_calls":
            return pb.Constraint(grammar=constraint.text)


def _check_counts(sampling: pb.SamplingOptions, stop: pb.StopOptions) -> None:
    for name, items, limit in (
        ("stop strings", stop.strings, MAX_STOP_STRINGS),
        ("stop token ids", stop.token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias entries", sampling.logit_bias, MAX_LOGIT_BIAS),
        ("allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_IDS),
        ("banned_token_ids", sampling.banned_token_ids, MAX_BANNED_IDS),
        ("bad_words", sampling.bad_words, MAX_BAD_WORDS),
    ):
        check_count(name, len(items), limit)
    for word in sampling.bad_words:
        check_count("ids of a bad word", len(word.ids), MAX_BAD_WORD_LEN)


def _given(message: Message, name: str, default: Any) -> Any:
    return getattr(message, name) if message.HasField(name) else default


def write_options(config: GenerationConfig, request: pb.GenerateRequest) -> None:
    """Write every field of a config, so that no default of the server's takes its place."""
    for name in _SCALARS:
        if (value := getattr(config, name)) is not None:
            setattr(request.sampling, name, value)
    for token_id, bias in dict(config.logit_bias).items():
        request.sampling.logit_bias.add(token_id=token_id, bias=bias)
    request.sampling.allowed_token_ids.extend(config.allowed_token_ids or ())
    request.sampling.banned_token_ids.extend(config.banned_token_ids)
    for word in config.bad_words_ids:
        request.sampling.bad_words.add(ids=word)
    request.stop.CopyFrom(
        pb.StopOptions(
            max_new_tokens=config.max_new_tokens,
            min_new_tokens=config.min_new_tokens,
            strings=config.stop,
            token_ids=config.stop_token_ids,
            ignore_eos=config.ignore_eos,
            include_stop_string=config.include_stop_str,
        )
    )
    if config.constraint is not None:
        request.constraint.CopyFrom(_write_constraint(config.constraint))
    processed = config.logprobs_mode == "processed"
    request.output.CopyFrom(
        pb.OutputOptions(
            logprobs=config.logprobs,
            prompt_logprobs=config.prompt_logprobs,
            logprobs_mode=pb.LOGPROBS_MODE_PROCESSED if processed else pb.LOGPROBS_MODE_RAW,
            echo=config.echo,
        )
    )
    if config.streaming is not None:
        write_streaming(config.streaming, request.streaming)


def write_streaming(streaming: Streaming, message: pb.StreamingOptions) -> None:
    """Write sinks, window and buffer."""
    for name in ("sink", "window", "buffer"):
        setattr(message, name, getattr(streaming, name))


def write_request_options(options: RequestOptions, request: pb.GenerateRequest) -> None:
    """Write what is not left at its default."""
    for name in _LABELS:
        if value := getattr(options, name):
            setattr(request, name, value)
    if options.time_limit is not None:
        request.time_limit.FromNanoseconds(max(1, round(options.time_limit * 1e9)))


def write_logprobs(
    logprobs: Sequence[float | None], top_logprobs: Sequence[TopLogprobs]
) -> list[pb.TokenLogprob]:
    """Write one entry per token; without most likely tokens where none were asked for."""
    tops = top_logprobs or [()] * len(logprobs)
    return [
        pb.TokenLogprob(
            logprob=logprob,
            top_token_ids=[token_id for token_id, _ in top],
            top_logprobs=[score for _, score in top],
        )
        for logprob, top in zip(logprobs, tops, strict=True)
    ]


def read_logprobs(entries: Iterable[pb.TokenLogprob]) -> tuple[TokenScore, ...]:
    """Read entries on the client's side."""
    return tuple(
        TokenScore(
            entry.logprob if entry.HasField("logprob") else None,
            tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)),
        )
        for entry in entries
    )

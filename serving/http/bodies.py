"""What the endpoints take, as types: each field with its bounds, null standing for absent.

The JSON decoder and the OpenAPI document are made from these. A field that is not here is refused,
so that a misspelt one is not silently without effect.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from swiftjax.engine.checks import MAX_LABEL_CHARS, MAX_TOKENS
from swiftjax.engine.generation import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from swiftjax.engine.streaming import MAX_BUFFER, MAX_SINK, MAX_WINDOW
from swiftjax.serving.http.tool_bodies import MAX_NAME_CHARS, MadeCalls, NamedTool, Tools

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_BYTES)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Ignored = Any  # taken, so that clients which send it work, and without effect


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class SchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema as OpenAI wraps it; every schema is held to, strict or not."""

    schema: dict[str, Any] | bool
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """The same, with kinds that OpenAI does not have; exactly one is set."""

    json: dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None


class StreamingOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """First and last tokens that are attended; prompt and answer may then be of any length."""

    sink: Annotated[int, Meta(ge=0, le=MAX_SINK)] | None = None
    window: Annotated[int, Meta(ge=1, le=MAX_WINDOW)] | None = None
    buffer: Annotated[int, Meta(ge=1, le=MAX_BUFFER)] | None = None


class Options(Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats share; the lines after `user` are ours, not OpenAI's."""

    model: Name | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    time_limit: Annotated[float, Meta(gt=0, le=10**6)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_TOKENS, le=MAX_TOKENS)] | None = None
    client_id: Label | None = None
    session_id: Label | None = None
    cache_salt: Label | None = None
    streaming: StreamingOptions | None = None
    session: Label | None = None  # the prompt is added to its text, and the answer after it
    turn_id: Label | None = None  # of such a turn, which is taken once


class OpenSessionBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sessions: what holds for all turns; the seed for those that bring none."""

    streaming: StreamingOptions | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    cache_salt: Label | None = None


class SessionBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sessions/fork and /v1/sessions/close."""

    session: Label


class SaveBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sessions/save: a file of this name, in place of an older one."""

    session: Label
    name: Label


class RestoreBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sessions/restore and /v1/sessions/delete."""

    name: Label


class CompletionBody(Options, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions: one or several prompts, each a text or token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn. An answer of ours, or of another server, may be sent back as it came."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    name: Annotated[str, Meta(max_length=64)] | None = None
    tool_calls: MadeCalls | None = None
    tool_call_id: Name | None = None
    function_call: Any = None
    audio: Any = None
    refusal: Ignored = None
    annotations: Ignored = None


class AppendBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sessions/append: text, token ids, or further turns of a chat."""

    session: Label
    prompt: str | list[TokenId] | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    turn_id: Label | None = None


class ChatBody(Options, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Asked for, these would change the answer, so they are refused.
    audio: Any = None
    modalities: list[str] | None = None
    moderation: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    # These change nothing here.
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    reasoning_effort: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    verbosity: Ignored = None


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text or a chat."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: Name | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None

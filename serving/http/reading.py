"""From bodies to what the engine takes: prompts, a GenerationConfig, and what else was asked.

Types and bounds are checked already (`bodies.py`); here is what fields mean together and for this
model. Knows no engine and does no I/O.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from swiftjax.engine.request import GenerationConfig, Prompt, RequestOptions
from swiftjax.engine.streaming import Streaming
from swiftjax.serving.http.bodies import (
    ChatBody,
    CompletionBody,
    Message,
    Options,
    StreamingOptions,
)
from swiftjax.serving.http.constraints import read_constraint
from swiftjax.serving.http.json_body import FieldError
from swiftjax.serving.http.tools import ToolUse
from swiftjax.serving.merging import MAX_ANSWERS
from swiftjax.serving.messages import check_text

# OpenAI's defaults, where they are not those of the engine.
DEFAULT_TEMPERATURE = 1.0
DEFAULT_COMPLETION_TOKENS = 16

# As much of a prompt as says which requests are likely to share a prefix with it.
PREFIX_TOKENS = 64
PREFIX_CHARS = 256

_REFUSED = (
    "audio", "moderation", "prediction", "web_search_options", "functions", "function_call",
)  # fmt: skip


class Asked(NamedTuple):
    """What a body asks for, whichever endpoint it came to."""

    config: GenerationConfig
    stream: bool
    include_usage: bool
    options: RequestOptions
    turn_id: str = ""

    def late(self, seconds: float) -> "Asked":
        """With what is left of its time, after a wait for a thread, say."""
        return self._replace(options=self.options.with_time_left(seconds))


def read_completion(body: CompletionBody, longest: int) -> tuple[list[Prompt], Asked]:
    """Read a completion of prompts up to a length; raises InvalidRequestError."""
    if body.suffix:
        raise FieldError("suffix: text cannot be inserted here; leave it out", "suffix")
    if body.best_of not in (None, body.n or 1):
        raise FieldError(f"best_of is {body.best_of}; it must equal n or be left out", "best_of")
    prompts = _read_prompts(body.prompt, longest)
    if body.session and len(prompts) > 1:
        raise FieldError("a session takes one prompt at a time", "prompt")
    if len(prompts) * (body.n or 1) > MAX_ANSWERS:
        raise FieldError(
            f"prompt: {len(prompts)} prompts with n {body.n or 1} are over {MAX_ANSWERS} answers; "
            "send fewer at a time",
            "prompt",
        )
    if body.echo and body.logprobs is not None and (body.n or 1) > 1:
        raise FieldError("n must be 1 with echo and logprobs: a prompt is scored once", "n")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise FieldError("max_tokens is 0, which needs echo: ask for at least 1", "max_tokens")
    return prompts, _asked(body, max_tokens, logprobs=body.logprobs, echo=bool(body.echo))


def read_chat(body: ChatBody, tools: ToolUse | None) -> Asked:
    """Read everything of a chat but its messages and tools; raises InvalidRequestError."""
    for name in _REFUSED:
        if getattr(body, name):
            raise FieldError(f"{name} is not supported: leave it out", name)
    if body.modalities not in (None, [], ["text"]):
        raise FieldError("modalities: only text is generated", "modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise FieldError("top_logprobs needs logprobs to be true", "top_logprobs")
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    elif body.max_tokens not in (None, max_tokens):
        raise FieldError("max_tokens and max_completion_tokens differ: give one", "max_tokens")
    if max_tokens == 0:
        raise FieldError("max_tokens is 0; it must be at least 1", "max_tokens")
    return _asked(
        body,
        max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tools=tools,
    )


def read_messages(messages: Sequence[Message], max_model_len: int) -> list[dict[str, Any]]:
    """Read a conversation as the chat template takes it; refuses what cannot fit."""
    if len(messages) > max_model_len:
        raise FieldError(
            f"messages: {len(messages)} of them; a model of {max_model_len} tokens takes fewer: "
            "drop the oldest",
            "messages",
        )
    turns = [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    check_text(sum(map(_num_chars, turns)), max_model_len)
    return turns


def _read_message(message: Message, name: str) -> dict[str, Any]:
    if message.audio or message.function_call:
        raise FieldError(f"{name}: audio and function_call are not supported", "messages")
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise FieldError(f"{name}.content is missing", "messages")
        content = ""
    fields = {
        "role": message.role,
        "content": content,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": msgspec.to_builtins(message.tool_calls or None),
    }
    return {key: value for key, value in fields.items() if value is not None}


def _num_chars(turn: dict[str, Any]) -> int:
    content = turn["content"]
    texts = [content] if isinstance(content, str) else [part.get("text") for part in content]
    texts += [call["function"]["arguments"] for call in turn.get("tool_calls", ())]
    return sum(len(text) for text in texts if isinstance(text, str))


def _read_prompts(prompt: str | list[Any], max_model_len: int) -> list[Prompt]:
    """One prompt per text or list of ids; a flat list of ids is one prompt."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not prompt:
        raise FieldError("prompt is empty: give at least one token", "prompt")
    elif any(type(item) is not type(prompt[0]) for item in prompt):
        raise FieldError("prompt mixes texts and token ids: give a list of one kind", "prompt")
    else:
        prompts = [prompt] if isinstance(prompt[0], int) else prompt
    for one in prompts:
        if isinstance(one, str):
            check_text(len(one), max_model_len)
        elif len(one) >= max_model_len:
            raise FieldError(
                f"the prompt has {len(one)} tokens; max_model_len is {max_model_len}, which must "
                f"hold the prompt and at least one new token: shorten it to {max_model_len - 1}",
                "prompt",
            )
    return prompts


def read_streaming(asked: StreamingOptions | None) -> Streaming | None:
    """Read sinks and window, if they are asked for."""
    if asked is None:
        return None
    given = {"sink": asked.sink, "window": asked.window, "buffer": asked.buffer}
    return Streaming(**{name: value for name, value in given.items() if value is not None})


def _asked(
    body: Options,
    max_tokens: int | None,
    *,
    logprobs: int | None,
    echo: bool = False,
    tools: ToolUse | None = None,
) -> Asked:
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options needs stream to be true", "stream_options")
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise FieldError(
            f"min_tokens is {min_tokens}, over max_tokens ({max_tokens}): lower it", "min_tokens"
        )
    named = {
        name: value
        for name in (
            "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "logit_bias", "seed", "n", "stop", "stop_token_ids", "ignore_eos",
        )
        if (value := getattr(body, name)) is not None
    }  # fmt: skip
    config = GenerationConfig(
        streaming=read_streaming(body.streaming),
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        include_stop_str=bool(body.include_stop_str_in_output),
        logprobs=logprobs,
        echo=echo,
        constraint=read_constraint(body, tools and tools.constraint),
        **named,
    )
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    options = RequestOptions(
        priority=body.priority or 0,
        client_id=body.client_id or "",
        session_id=body.session_id or "",
        cache_salt=body.cache_salt or "",
        time_limit=body.time_limit,
    )
    if body.turn_id and not body.session:
        raise FieldError("turn_id belongs to the turns of a session: leave it out", "turn_id")
    return Asked(config, bool(body.stream), include_usage, options, body.turn_id or "")


def prefix_hash(prompt: Prompt) -> str:
    """A name for the head of a prompt, so that a balancer can send its likes to one server."""
    if isinstance(prompt, str):
        head = prompt[:PREFIX_CHARS]
    else:
        head = " ".join(map(str, prompt[:PREFIX_TOKENS]))
    return hashlib.sha256(head.encode()).hexdigest()[:16]

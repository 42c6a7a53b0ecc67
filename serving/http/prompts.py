"""Prompts to token ids, away from the event loop: a long one takes a while."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from swiftjax.engine.request import Prompt
from swiftjax.engine.text_threads import count_chars, in_thread, tokenise
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.serving.http.bodies import Message
from swiftjax.serving.http.reading import read_messages


async def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    max_model_len: int,
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Turn a conversation, and the tools on offer, into ids."""
    turns = read_messages(messages, max_model_len)
    apply = partial(
        tokenizer.apply_chat_template,
        turns,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
    )
    ids = await in_thread(count_chars([*turns, *(tools or ())]), apply)
    return cast(list[int], ids)  # text only with tokenize=False


async def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Turn a prompt into ids, unless it is ids."""
    if isinstance(prompt, str):
        return await tokenise(tokenizer, prompt)
    return list(prompt)

"""Further turns of a chat as the tokens that follow what a session has already.

A template renders whole conversations only; what it puts after an answer is found behind a mark in
a conversation of our own. Knows no session. Used by whatever appends messages to one.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from swiftjax.engine.request import Prompt
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import InvalidRequestError

_MARK = "7f2d\u241e91ce"

Messages = SequenceOf[Mapping[str, Any]]


def read_content(
    tokenizer: Tokenizer, content: Prompt | Messages, before: SequenceOf[int]
) -> list[int]:
    """Tokens of text, of messages, or as they are given, to follow `before`.

    Text gets the special tokens of a beginning only where it is one.
    """
    if isinstance(content, str):
        return tokenizer.encode(content, not before)
    messages = [item for item in content if isinstance(item, Mapping)]
    if messages and len(messages) == len(content):
        return _turn(tokenizer, messages, before)
    return [item for item in content if not isinstance(item, Mapping)]


def _turn(tokenizer: Tokenizer, messages: Messages, before: SequenceOf[int]) -> list[int]:
    chat = [dict(message) for message in messages]
    if not before:
        return list(tokenizer.apply_chat_template(chat))
    earlier = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    text = str(tokenizer.apply_chat_template([*earlier, *chat], tokenize=False))
    _, mark, rest = text.partition(_MARK)
    if not mark:
        raise InvalidRequestError(
            "the chat template hides the answers of earlier turns, so no turn can be appended: "
            "append text or token ids"
        )
    ids = tokenizer.encode(rest, False)
    # What closes an answer is there already, unless the answer was cut short.
    return ids[1:] if ids and ids[0] == before[-1] else ids

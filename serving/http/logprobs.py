"""Log-probabilities in OpenAI's two forms: columns for completions, a list of tokens for chats.

Knows tokens and their texts, nothing of requests. Used by `writing.py`.
"""

from collections.abc import Sequence
from typing import Any

from swiftjax.engine.detokenizer import Detokenizer
from swiftjax.engine.request import StreamOutput, TopLogprobs
from swiftjax.engine.tokenizer import Tokenizer

# What OpenAI writes where JSON has no number.
LOWEST = -9999.0


def shown_scores(output: StreamOutput) -> tuple[Sequence[int], Sequence[float], Sequence[Any]]:
    """Ids, log-probabilities and most likely tokens of the tokens that the answer shows.

    A stop token is counted but not shown.
    """
    count = len(output.token_ids) - isinstance(output.matched_stop, int)
    tops = output.top_logprobs or ((),) * len(output.token_ids)
    return output.token_ids[:count], output.logprobs[:count], tops[:count]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    r"""What a token writes; `bytes:\xf0\x9f` where that is a part of a character."""
    piece = tokenizer.token_bytes(token_id, skip_special_tokens=False)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Columns:
    """The logprobs of one choice of a completion; a part at a time."""

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        """`start` is where in the text the first token stands."""
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer)
        self._offset = start

    def write(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[TopLogprobs],
    ) -> dict[str, list[Any]]:
        """Write the next tokens; the first of a prompt has None for its log-probability."""
        offsets = []
        for token_id in ids:
            offsets.append(self._offset)
            self._offset += len(self._text.push([token_id]))
        return {
            "tokens": [token_text(self._tokenizer, i) for i in ids],
            "token_logprobs": [None if p is None else max(p, LOWEST) for p in logprobs],
            "top_logprobs": [
                None if own is None else self._top(top, token_id, own)
                for token_id, own, top in zip(ids, logprobs, tops, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, top: TopLogprobs, token_id: int, logprob: float) -> dict[str, float]:
        pairs = (*top, (token_id, logprob))  # the token itself is there even if it is unlikely
        return {token_text(self._tokenizer, i): max(p, LOWEST) for i, p in pairs}


def token_list(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[TopLogprobs],
) -> list[dict[str, Any]]:
    """The logprobs of some tokens of a chat's answer."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes(token_id, skip_special_tokens=False)),
        }

    return [
        entry(token_id, logprob) | {"top_logprobs": [entry(i, p) for i, p in top]}
        for token_id, logprob, top in zip(ids, logprobs, tops, strict=True)
    ]

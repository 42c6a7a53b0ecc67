"""What a request adds to, allows and bans in the scores of tokens, step by step.

Plain ids on the host: the device gets one bounded list per row (`TokenEdits`) and needs to know
nothing of stop tokens or words. A sequence without such wishes has no rules and costs nothing.
Called by the scheduler's sequences and by `batching.py`.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from swiftjax.engine.request import Request

BANNED = -math.inf


class TokenRules:
    """The rules of one request. Whatever they ban, at least one token stays."""

    def __init__(self, request: Request) -> None:
        generation = request.generation
        self.only_listed = generation.allowed_token_ids is not None
        self._values = dict.fromkeys(generation.allowed_token_ids or (), 0.0)
        self._change(dict(generation.logit_bias))
        self._change(dict.fromkeys(generation.banned_token_ids, BANNED))
        words = generation.bad_words_ids
        self._change({word[0]: BANNED for word in words if len(word) == 1})
        self._words = [(tuple(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._min_len = len(request.prompt_token_ids) + generation.min_new_tokens
        self._stops = request.stop_token_ids
        self.has_edits = _has_edits(request)
        prompt_len = len(request.prompt_token_ids)
        self.grammar = None if request.grammar is None else request.grammar.start(prompt_len)

    def edits(self, token_ids: SequenceOf[int]) -> dict[int, float]:
        """What to add to the score of each listed id for the token after these (prompt too)."""
        stops = self._stops if len(token_ids) < self._min_len else ()
        words = [last for head, last in self._words if _ends_with(token_ids, head)]
        if not stops and not words:
            return self._values
        values = dict(self._values)
        self._ban(values, stops)
        before = dict(values)
        self._ban(values, words)
        # Words complete by chance; if they ban the last of the allowed tokens, they yield.
        is_empty = self.only_listed and all(value == BANNED for value in values.values())
        return before if is_empty else values

    def _ban(self, values: dict[int, float], ids: Iterable[int]) -> None:
        for token_id in ids:
            if not self.only_listed or token_id in values:
                values[token_id] = BANNED

    def _change(self, changes: dict[int, float]) -> None:
        for token_id, value in changes.items():
            if not self.only_listed or token_id in self._values:
                self._values[token_id] = value


def make_rules(request: Request) -> TokenRules | None:
    """The rules of a request; None if it has none."""
    has_any = request.grammar is not None or _has_edits(request)
    return TokenRules(request) if has_any else None


def _has_edits(request: Request) -> bool:
    config = request.generation
    asks = (
        config.logit_bias,
        config.allowed_token_ids is not None,
        config.banned_token_ids,
        config.bad_words_ids,
        config.min_new_tokens and request.stop_token_ids,
    )
    return any(asks)


def _ends_with(token_ids: SequenceOf[int], head: tuple[int, ...]) -> bool:
    return tuple(token_ids[-len(head) :]) == head

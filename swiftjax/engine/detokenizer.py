"""Token ids to text as they arrive: whole characters only, stop strings never shown.

`Detokenizer` turns ids into text deltas, `TextStream` adds the end of a request. Both cost O(1) per
token. Knows nothing about requests or scheduling; used by `AsyncEngine` and by `api.Engine`.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol, SupportsIndex, runtime_checkable

from swiftjax.engine.request import FinishReason, GenerationConfig


@runtime_checkable
class TokenTexts(Protocol):
    """The part of a tokenizer that streams need."""

    leading_spaces: int

    def token_bytes(self, token_id: SupportsIndex, skip_special_tokens: bool = True) -> bytes:
        """What one token writes."""
        ...


class Detokenizer:
    """Incremental `Tokenizer.decode`: the deltas joined equal the decoding of all ids."""

    def __init__(self, tokenizer: TokenTexts, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._spaces_to_drop = tokenizer.leading_spaces
        self._rest = b""  # of a character that is not complete

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the characters that these tokens complete."""
        token_bytes, skip = self._tokenizer.token_bytes, self._skip_special_tokens
        data = self._rest + b"".join([token_bytes(i, skip) for i in token_ids])
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[num_used:]
        return self._trim(text) if self._spaces_to_drop else text

    def finish(self) -> str:
        """Return U+FFFD for a character that was cut off, else nothing. Call once, at the end."""
        return self._trim(self._rest.decode("utf-8", "replace"))

    def _trim(self, text: str) -> str:
        while self._spaces_to_drop and text:
            if text[0] != " ":
                self._spaces_to_drop = 0
                break
            text = text[1:]
            self._spaces_to_drop -= 1
        return text


class StopScan(NamedTuple):
    """What one piece of text settled: text that may be shown, and the stop string that ended it."""

    text: str
    matched: str | None


class StopStrings:
    """Finds the stop string that is complete first; of several complete at once, the longest.

    Each stop string is followed by its own Knuth-Morris-Pratt automaton, whose state is the length
    of the head seen at the end of the text: the longest state is what has to be held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [(stop, _failures(stop)) for stop in stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Take text; return what can no longer be part of a stop string."""
        if not self._stops:
            return StopScan(text, None)
        seen = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            complete = [stop for stop in self._advance(char) if stop is not None]
            if complete:
                stop = max(complete, key=len)
                self._held = ""
                return StopScan(seen[: end if self._include else end - len(stop)], stop)
        shown = len(seen) - max(self._states)
        self._held = seen[shown:]
        return StopScan(seen[:shown], None)

    def finish(self) -> str:
        """Return the text still held back: nothing will complete it now."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> list[str | None]:
        """Feed one character to every automaton; list the stop strings it completes."""
        complete: list[str | None] = []
        for index, (stop, failures) in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != char:
                state = failures[state - 1]
            state += stop[state] == char
            self._states[index] = state
            complete.append(stop if state == len(stop) else None)
        return complete


def _failures(stop: str) -> list[int]:
    """For every head of the stop, the length of its longest proper head that is also its tail."""
    failures = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = failures[state - 1]
        state += stop[state] == stop[index]
        failures[index] = state
    return failures


class TextDelta(NamedTuple):
    """Text to show now; at the end the reason, and the stop string or stop token id if one hit."""

    text: str
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class TextStream:
    """The text of one request, from first token to last."""

    def __init__(self, tokenizer: TokenTexts, generation: GenerationConfig) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._has_stops = bool(generation.stop)
        self._stops = StopStrings(tuple(generation.stop), include=generation.include_stop_str)
        self._finished = False

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> TextDelta:
        """Take what one step produced; the last token of a "stop" is not shown.

        A stop string ends the text with "stop" whatever reason was given. Once finished, further
        pushes return an empty delta.
        """
        if self._finished:
            return TextDelta("")
        self._finished = finish_reason is not None
        stop_token: int | None = None
        if finish_reason == "stop" and token_ids:
            token_ids, stop_token = token_ids[:-1], int(token_ids[-1])
        text = self._detokenizer.push(token_ids)
        if self._finished:
            text += self._detokenizer.finish()
        if not self._has_stops:
            return TextDelta(text, finish_reason, stop_token)
        scan = self._stops.push(text)
        if scan.matched is not None:
            self._finished = True
            return TextDelta(scan.text, "stop", scan.matched)
        if not self._finished:
            return TextDelta(scan.text)
        return TextDelta(scan.text + self._stops.finish(), finish_reason, stop_token)

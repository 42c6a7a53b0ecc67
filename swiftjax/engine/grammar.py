"""Constraints compiled to masks over the vocabulary, by llguidance.

Compiling takes milliseconds and is bounded in size and work; it happens in the caller's thread,
never in the engine's, and lets other threads run. A mask is computed per step and row, in tens of
microseconds. The only module that knows llguidance.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from swiftjax.engine.constraint import Constraint
from swiftjax.errors import InvalidRequestError, UnsupportedError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 300


class Grammar:
    """A compiled constraint; every answer starts from a copy of it."""

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: SequenceOf[int]) -> None:
        self.num_words = -(-vocab_size // 32)
        self.eos_token_ids = tuple(eos_token_ids)
        self._matcher = matcher

    def start(self, prompt_len: int) -> "GrammarState":
        """Begin an answer after a prompt of so many tokens."""
        return GrammarState(self._matcher.deep_copy(), self, prompt_len)


class GrammarState:
    """How far one answer has come. Owned by its sequence."""

    def __init__(self, matcher: Any, grammar: Grammar, prompt_len: int) -> None:
        self.num_words = grammar.num_words
        self._eos_token_ids = grammar.eos_token_ids
        self._matcher = matcher
        self._num_seen = prompt_len
        self._has_given_up = False

    def fill(self, token_ids: SequenceOf[int], words: Any) -> None:
        """Write which tokens may follow these (prompt too); complete answers may only end.

        `words` has a bit per token: an int32 array [num_words].
        """
        if not self._has_given_up and not self._advance(token_ids, words):
            # (Why is not logged: it quotes the answer.)
            logger.warning("a constraint gave up: %s", self._matcher.stop_reason())
            self._has_given_up = True
        if self._has_given_up:
            # Too complex at this point of the text: what there is, is all there will be.
            words[:] = 0
            for token_id in self._eos_token_ids:
                words[token_id // 32] |= _bit(token_id % 32)

    def _advance(self, token_ids: SequenceOf[int], words: Any) -> bool:
        """Follow the text and write the mask; False when that cannot be done any more."""
        try:
            for token_id in token_ids[self._num_seen :]:
                self._matcher.consume_token(token_id)
            self._num_seen = len(token_ids)
            if not self._matcher.is_error():
                self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            return not self._matcher.is_error()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the library must not end the engine's thread
            return False


def _bit(place: int) -> int:
    """One bit of an int32, whose highest is its sign."""
    return 1 << place if place < 31 else -(1 << 31)


class GrammarCompiler:
    """Compiles for one model's vocabulary; the first constraint pays for reading that."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: SequenceOf[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self.told: Callable[[float], None] | None = None  # gets the seconds each one took

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile; raises InvalidRequestError for what is wrong, too complex or not supported."""
        if not self._eos_token_ids:
            raise InvalidRequestError(
                f"{constraint.kind}: the model has no end-of-sequence token, so no answer could end"
            )
        begun = time.monotonic()
        matcher = self._make_matcher(_to_source(constraint))
        if self.told is not None:
            self.told(time.monotonic() - begun)
        if matcher.is_error():
            raise _refusal(constraint, matcher.get_error())
        return Grammar(matcher, self._vocab_size, self._eos_token_ids)

    def _make_matcher(self, source: str) -> Any:
        from llguidance import LLMatcher

        try:
            return LLMatcher(self._vocabulary(), source, log_level=0)
        except Exception:
            raise
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            # The library gave up on an assumption of its own; to Python that is no Exception.
            raise UnsupportedError("constraints do not work with this model's tokenizer") from error

    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    self._tokenizer_json,
                    n_vocab=self._vocab_size,
                    eos_token=list(self._eos_token_ids),
                )
            return self._tokenizer


def _to_source(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    try:
        match constraint.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(constraint.text)
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}')
            case "regex":
                # llguidance reads `a**` as `(a*)*`; elsewhere it is a mistake, and so it is here.
                re.compile(constraint.text)
                return LLMatcher.grammar_from_regex(constraint.text)
            case "grammar" if "::=" in constraint.text:
                return LLMatcher.grammar_from_lark(_from_gbnf(constraint.text))
            case "grammar" | "tool_calls":
                return LLMatcher.grammar_from_lark(constraint.text)
            case "choice":
                texts = (json.dumps(text, ensure_ascii=False) for text in constraint.choices)
                return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
    except (ValueError, re.error, OverflowError, RecursionError) as error:
        raise _refusal(constraint, str(error)) from None


def _from_gbnf(text: str) -> str:
    """Turn a grammar in the EBNF of llama.cpp, which starts with `root`, into Lark's notation."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from None


def _refusal(constraint: Constraint, reason: str) -> InvalidRequestError:
    line = " ".join(reason.split())[:MAX_MESSAGE_CHARS]
    return InvalidRequestError(f"{constraint.kind} cannot be used: {line}")

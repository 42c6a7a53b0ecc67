"""Text to token ids and back, chat messages to token ids.

Wraps the tokenizers library; decides where BOS and EOS go and what text is refused. Knows nothing
about requests or models. Safe to share between threads. Streams decode with `detokenizer`.
"""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, SupportsIndex, overload

import tokenizers

from swiftjax.engine.chat_messages import check_text
from swiftjax.engine.chat_template import ChatTemplate
from swiftjax.engine.token_bytes import read_decoder
from swiftjax.errors import CheckpointError, InvalidRequestError
from swiftjax.tokenizer_files import TokenizerFiles

MAX_CHARS = 4 * 2**20  # a request body of 16 MiB holds at least this many characters
_TEMPLATE_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Encoding(NamedTuple):
    """Token ids and, for each, the half-open range of characters it came from."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """The tokenizer of one checkpoint.

    The post-processor of tokenizer.json alone says where BOS and EOS go, as in transformers 5,
    which ignores `add_bos_token` and `add_eos_token` of tokenizer_config.json beside it.
    """

    def __init__(
        self,
        files: TokenizerFiles,
        *,
        chat_template: str | None = None,
        max_chars: int = MAX_CHARS,
    ) -> None:
        """Build from checkpoint files; `chat_template` replaces the checkpoint's template text.

        Raises CheckpointError for a broken tokenizer.json, UnsupportedError for a decoder that is
        not known and for a broken `chat_template` (the checkpoint's own is compiled on first use).
        """
        self._backend = _load_backend(files)
        self._decoder = read_decoder(json.loads(files.tokenizer_json).get("decoder"))
        self.leading_spaces = self._decoder.leading_spaces  # a decoded text starts without them
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        self.bos_token_id = self._special_id(files, "bos_token")
        self.eos_token_id = self._special_id(files, "eos_token")
        self.max_chars = max_chars
        self._pieces: list[bytes | None] = [None] * self.vocab_size
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._prefix, self._suffix = self._find_affixes()
        source = files.chat_template if chat_template is None else chat_template
        self.files = replace(files, chat_template=source)
        self._template = None if source is None else ChatTemplate(source, _variables(files))
        if self._template is not None and chat_template is not None:
            self._template.check()

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template can tell a model of tools."""
        return self._template is not None and self._template.knows_tools

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenise. A text that already starts with BOS does not get a second one.

        Raises InvalidRequestError for text over `max_chars`, with NUL or with lone surrogates.
        """
        # Offsets would take ten times as long to write as ids, with the interpreter lock held.
        ids = self._encode(text).ids
        return [*self._head(ids), *ids, *self._suffix] if add_special_tokens else ids

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Tokenise as `encode` does; tokens that were added have an empty range."""
        encoding = self._encode(text)
        ids, offsets = encoding.ids, encoding.offsets
        if not add_special_tokens:
            return Encoding(ids, offsets)
        head = self._head(ids)
        before, after = [(0, 0)] * len(head), [(len(text), len(text))] * len(self._suffix)
        return Encoding([*head, *ids, *self._suffix], [*before, *offsets, *after])

    def _encode(self, text: str) -> tokenizers.Encoding:
        check_text(text, "the text", self.max_chars)
        # A batch of one, because only that lets other threads run: `encode` keeps the interpreter
        # lock, for seconds when the text is long.
        return self._backend.encode_batch([text], add_special_tokens=False)[0]

    def _head(self, ids: list[int]) -> list[int]:
        """What goes before a text of these ids."""
        prefix = self._prefix
        has_bos = ids and prefix and ids[0] == prefix[-1] == self.bos_token_id
        return prefix[:-1] if has_bos else prefix

    def decode(self, token_ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that form no character become U+FFFD.

        Ids past the vocabulary (a model may be padded) write nothing. Raises InvalidRequestError
        for a negative id.
        """
        pieces = [self.token_bytes(i, skip_special_tokens) for i in token_ids]
        text = b"".join(pieces).decode("utf-8", "replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self.leading_spaces) :]

    def token_bytes(self, token_id: SupportsIndex, skip_special_tokens: bool = True) -> bytes:
        """What one token writes, before `leading_spaces` are taken off the whole text."""
        token_id = operator.index(token_id)
        if token_id < 0:
            raise InvalidRequestError(f"token id {token_id} is negative")
        if token_id >= self.vocab_size or (skip_special_tokens and token_id in self._special_ids):
            return b""
        piece = self._pieces[token_id]
        if piece is None:
            token = self._backend.id_to_token(token_id)
            piece = b"" if token is None else self._decoder.to_bytes(token)
            self._pieces[token_id] = piece
        return piece

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[False],
    ) -> str: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
    ) -> list[int] | str:
        """Render messages (`role`, `content`, tool calls) into a prompt; blocks for a moment.

        The template alone decides about BOS (none is added) and how `tools` are told to the model.
        Raises InvalidRequestError when the model has no template, a message is malformed or the
        template refuses the conversation.
        """
        if self._template is None:
            raise InvalidRequestError(
                "the model has no chat template: send a raw prompt, or start with --chat-template"
            )
        text = self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            max_chars=self.max_chars,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _special_id(self, files: TokenizerFiles, name: str) -> int | None:
        token = files.special_token(name)
        return None if token is None else self._backend.token_to_id(token)

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        """The ids that go before and after every text."""
        # The post-processor is a black box: look at what it puts around a text.
        for probe in ("a", "0", ".", " ", "\n"):
            plain = self._backend.encode(probe, add_special_tokens=False).ids
            whole = self._backend.encode(probe, add_special_tokens=True).ids
            for start in range(len(whole) - len(plain) + 1 if plain else 0):
                if whole[start : start + len(plain)] == plain:
                    return whole[:start], whole[start + len(plain) :]
        return [], []


def _load_backend(files: TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.json cannot be used: {error}") from error
    if not backend.get_vocab_size(with_added_tokens=True):
        raise CheckpointError("tokenizer.json has an empty vocabulary")
    # A file may carry the settings of a training run; a prompt must never be cut or padded.
    backend.no_truncation()
    backend.no_padding()
    # BOS and EOS written in a text are those tokens even where tokenizer.json does not list them.
    named = [files.special_token(name) for name in ("bos_token", "eos_token")]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [t for t in named if t and t not in known and backend.token_to_id(t) is not None]
    if missing:
        backend.add_special_tokens(missing)
    return backend


def _variables(files: TokenizerFiles) -> dict[str, str]:
    """The special tokens that templates may name."""
    tokens = {f"{n}_token": files.special_token(f"{n}_token") for n in _TEMPLATE_TOKENS}
    return {name: token for name, token in tokens.items() if token is not None}

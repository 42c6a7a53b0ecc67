"""Conversations of the blocking engine that keep their pages from turn to turn.

Knows texts and files; turns are run by the Engine that opened the session. Made by
`Engine.open_session` and `Engine.restore_session`.
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from swiftjax.engine.chat_turns import Messages, read_content
from swiftjax.engine.request import GenerationConfig, Prompt, RequestOutput
from swiftjax.engine.session import SessionText
from swiftjax.engine.session_file import save_session
from swiftjax.engine.session_pages import SessionPages
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import InvalidRequestError

Answer = Callable[[SessionText, GenerationConfig], RequestOutput]


class Session:
    """One conversation. Close it, or use it in a `with`, to give its pages back at once."""

    def __init__(
        self, text: SessionText, tokenizer: Tokenizer, pages: SessionPages, answer: Answer
    ) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._pages = pages
        self._answer = answer
        self._is_open = True

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole text so far."""
        return tuple(self._text.token_ids)

    def __len__(self) -> int:
        """Tokens of text so far."""
        return len(self._text.token_ids)

    def append(self, content: Prompt | Messages) -> None:
        """Add text, token ids, or messages such as `[{"role": "user", "content": "And then?"}]`.

        Nothing is computed before the next `generate`. Messages are rendered by the chat template.
        """
        self._check_open()
        self._text.append(read_content(self._tokenizer, content, self._text.token_ids))

    def generate(self, config: GenerationConfig | None = None) -> RequestOutput:
        """Go on with the text. What is computed is what was appended, not what was there before.

        The answer becomes part of the text, up to the token that ended it.
        """
        self._check_open()
        return self._answer(self._text, self._text.configure(config or GenerationConfig()))

    def fork(self) -> "Session":
        """Open another session with the same text, which shares all pages so far."""
        self._check_open()
        text = self._text.fork()
        self._pages.fork(self._text.session_id, text.session_id)
        return Session(text, self._tokenizer, self._pages, self._answer)

    def save(self, path: str | Path) -> None:
        """Write everything to a file, from which any process with the same model can go on.

        Raises InvalidRequestError where it cannot be written; what was there then stays.
        """
        self._check_open()
        save_session(self._pages, self._text.session_id, self._text.state(), Path(path))

    def close(self) -> None:
        """Give up the pages; the session takes nothing any more."""
        self._is_open = False
        self._pages.close(self._text.session_id)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidRequestError("the session is closed: open another one")

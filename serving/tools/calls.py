"""Tool calls in what a model writes: text in as it comes, contents and calls out.

What begins like a call and is none, or one of a tool that was not offered, is contents after all.
One reader per choice; knows nothing of OpenAI's JSON.
"""

from typing import NamedTuple

from swiftjax.serving.tools.formats import ToolFormat
from swiftjax.serving.tools.scanner import CallScanner

# Llama writes it before calls; where it is no special token it shows in the text.
PYTHON_TAG = "<|python_tag|>"


class CallDelta(NamedTuple):
    """What is new of one call; its first delta has the name."""

    index: int
    arguments: str
    name: str | None = None


class Read(NamedTuple):
    """What some text told."""

    content: str
    calls: list[CallDelta]


class CallReader:
    """Reads one answer. `max_calls` is the most that are told: the rest of the answer is not."""

    def __init__(self, style: ToolFormat, names: frozenset[str], max_calls: int | None) -> None:
        self.num_calls = 0
        self._style = style
        self._names = names
        self._max_calls = max_calls
        self._scanner: CallScanner | None = None
        self._is_told = False  # of the call that is being read: its name
        self._may_open = True  # of a format without an opening: a call may begin here
        self._is_behind = False  # a call, and nothing but blanks and closings since
        self._rest = ""  # not decided yet
        self._before = ""  # what stood before the call that is being read, if it is one
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def push(self, text: str, *, is_last: bool = False) -> Read:
        """Read what is new; the last text decides about everything that was held back."""
        self._rest += text
        while self._rest and self._go_on():
            pass
        if is_last:
            self._finish()
        read = Read("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return read

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def _go_on(self) -> bool:
        """Read on; False when more text is needed."""
        if self._scanner is not None:
            return self._read_call(self._scanner)
        if self._is_full:
            self._rest = ""
            return False
        return self._find_tag() if self._style.opening else self._find_object()

    def _read_call(self, scanner: CallScanner) -> bool:
        self._rest = self._rest[scanner.feed(self._rest) :]
        name = scanner.name
        if scanner.is_broken or (name is not None and name not in self._names):
            self._give_up(scanner)
            return True
        if scanner.is_call:
            arguments = scanner.take_arguments()
            if not self._is_told:
                self._is_told = True
                self._calls.append(CallDelta(self.num_calls, arguments, name))
            elif arguments:
                self._calls.append(CallDelta(self.num_calls, arguments))
        if not scanner.is_done:
            return False
        self.num_calls += 1
        self._is_behind = True
        self._end_call(may_open=True)
        return True

    def _give_up(self, scanner: CallScanner) -> None:
        if self._is_told:
            self.num_calls += 1  # what was told stays told
            self._is_behind = True
        else:
            self._tell(self._before + scanner.raw)
        self._end_call(may_open=False)

    def _end_call(self, *, may_open: bool) -> None:
        self._scanner, self._is_told = None, False
        self._before, self._may_open = "", may_open

    def _find_tag(self) -> bool:
        """Text up to the next opening is contents; closings and blanks around calls are not."""
        if self._is_behind:
            text = self._rest.lstrip()
            if text.startswith(self._style.closing):
                self._rest = text[len(self._style.closing) :]
                return True
            if self._style.closing.startswith(text):
                return False  # blanks, or what may become a closing
        before, tag, after = self._rest.partition(self._style.opening)
        if tag:
            content = before.rstrip()
            self._tell(content)
            self._before, self._rest = before[len(content) :] + tag, after
            self._scanner = CallScanner()
            return True
        held = _num_held(before, self._style.opening)
        self._tell(before[: len(before) - held])
        self._rest = before[len(before) - held :]
        return False

    def _find_object(self) -> bool:
        """Calls stand at the very start, one after the other."""
        if not self._may_open:
            self._tell(self._before + self._rest)
            self._before = self._rest = ""
            return False
        text = self._rest.lstrip(" \n\t;" if self.num_calls else " \n\t")
        begins = next((mark for mark in (PYTHON_TAG, "{") if text.startswith(mark)), None)
        if begins is None:
            # Blanks, or what may become a tag, wait.
            self._may_open = PYTHON_TAG.startswith(text)
            return not self._may_open
        skipped = len(self._rest) - len(text) + (len(begins) if begins == PYTHON_TAG else 0)
        self._before += self._rest[:skipped]
        self._rest = self._rest[skipped:]
        if begins == "{":
            self._scanner = CallScanner()
        return True

    def _tell(self, content: str) -> None:
        if content:
            self._content.append(content)
            self._is_behind = False

    def _finish(self) -> None:
        if self._scanner is not None:
            self._give_up(self._scanner)
        self._rest = self._before + self._rest
        if not self._is_behind or not self._style.closing.startswith(self._rest.strip()):
            self._tell(self._rest)
        self._rest = ""


def _num_held(text: str, tag: str) -> int:
    """How much of the end of a text may belong to a tag, with blanks before it."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-size:]):
            break
    else:
        size = 0
    kept = text[: len(text) - size]
    return size + len(kept) - len(kept.rstrip())

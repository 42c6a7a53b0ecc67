"""Chat messages to prompt text by the model's Jinja template, run as untrusted code.

A template comes from the checkpoint or from the operator, never from a request. It runs in a
small process of its own (`template_worker.py`) with limits on steps, CPU time, memory and files.
Called by `Tokenizer.apply_chat_template`; knows nothing about tokens.
"""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftjax.engine import template_worker
from swiftjax.engine.chat_messages import check_messages, check_text, check_tools
from swiftjax.errors import InvalidRequestError, SwiftJaxError, UnsupportedError

MAX_TEMPLATE_CHARS = 2**20
# CPU time is limited in the worker. Waiting longer than this means that it hangs.
WAIT_SECONDS = 20.0
_TOOLS = re.compile(r"\btools\b")


class ChatTemplate:
    """One template and the process that runs it; renders of several threads take turns."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Take a template and the special tokens it may name; compiles nothing yet."""
        self._setup = {"source": source, "variables": dict(variables)}
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize | None = None
        self._broken: str | None = None  # found out once, then told to every caller
        self.knows_tools = _TOOLS.search(source) is not None

    def check(self) -> None:
        """Compile. Raises UnsupportedError for a template that cannot be used."""
        with self._lock:
            self._ready_worker()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        max_chars: int,
    ) -> str:
        """Render messages, and the tools on offer, of at most `max_chars` characters in all.

        Raises UnsupportedError for a template that does not compile, InvalidRequestError for
        malformed messages, a conversation the template refuses, and a template that needs more
        than its budget.
        """
        question: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if tools:
            question["tools"] = check_tools(tools, max_chars)
            max_chars -= len(json.dumps(question["tools"]))
        question["messages"] = check_messages(messages, max_chars)
        with self._lock:
            return self._ask(self._ready_worker(), question)

    def _ready_worker(self) -> subprocess.Popen[bytes]:
        if self._worker is not None and self._worker.poll() is None:
            return self._worker
        if self._broken is not None:
            raise UnsupportedError(self._broken)
        try:
            check_text(self._setup["source"], "the chat template", MAX_TEMPLATE_CHARS)
        except InvalidRequestError as error:
            raise UnsupportedError(str(error)) from None
        self._end_worker()
        # -P keeps the worker's folder off sys.path. A session of its own keeps Ctrl-C away.
        self._worker = subprocess.Popen(
            [sys.executable, "-P", str(Path(template_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._stop = weakref.finalize(self, _end, self._worker)
        try:
            self._ask(self._worker, self._setup)
        except SwiftJaxError as error:
            self._end_worker()
            if isinstance(error, UnsupportedError):
                self._broken = str(error)
            raise
        return self._worker

    def _end_worker(self) -> None:
        if self._stop is not None:
            self._stop()
        self._worker = self._stop = None

    def _ask(self, worker: subprocess.Popen[bytes], question: object) -> str:
        line = _exchange(worker, json.dumps(question, ensure_ascii=False).encode() + b"\n")
        if line is None:
            self._end_worker()
            raise InvalidRequestError(_death(worker.returncode))
        answer = json.loads(line)
        if "text" in answer:
            return answer["text"]
        kind, detail = answer["error"], answer["detail"]
        if kind == "unsupported":
            raise UnsupportedError(f"the chat template cannot be used: {detail}")
        raise InvalidRequestError(f"the chat template {_VERBS[kind]}: {detail}")


_VERBS = {
    "refused": "refused the messages",
    "failed": "failed on these messages",
    "budget": "went over its budget",
}


def _exchange(worker: subprocess.Popen[bytes], question: bytes) -> bytes | None:
    """Send one line and read one; None when the worker died or hung."""
    assert worker.stdin is not None and worker.stdout is not None
    deadline = time.monotonic() + WAIT_SECONDS
    parts: list[bytes] = []
    try:
        worker.stdin.write(question)
        worker.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(worker.stdout, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                parts.append(os.read(worker.stdout.fileno(), 2**16))
                if not parts[-1]:
                    return None
    except OSError:
        return None
    return b"".join(parts)


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # unsent bytes of a dead worker
            pass


def _death(returncode: int | None) -> str:
    if returncode == -signal.SIGPROF:
        cause = f"went over its budget: {template_worker.CPU_SECONDS} s of CPU time"
    elif returncode == -signal.SIGABRT:
        cause = f"went over its budget: {template_worker.MEMORY_BYTES // 2**20} MiB of memory"
    else:
        cause = f"ended its process (status {returncode}) or ran over {WAIT_SECONDS:g} s"
    return f"the chat template {cause}"

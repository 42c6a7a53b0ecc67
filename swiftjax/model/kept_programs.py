"""Compiled programs on disk, so that the next start of the same engine need not trace them.

XLA's own cache is asked with a traced program, and tracing is most of a warm start. Here a program
is found by what it is made from: see `surroundings.py`. Knows nothing of models; called by
`programs.py`, and opened where an engine is built.
"""

import functools
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from swiftjax.disk import is_private
from swiftjax.model.surroundings import settings, surroundings

logger = logging.getLogger(__name__)

# Some ten engines of 8B parameters; what was not used for longest goes first.
MAX_BYTES = 2**30
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A function to be compiled for arguments of given shapes."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]  # abstract
    result: Any  # any tree with the structure of what comes back
    donated: tuple[int, ...] = ()
    keeps_unused: bool = False  # whether arguments that are not read are passed, and donated, too
    options: dict[str, bool | str] = field(default_factory=dict[str, bool | str])

    def lower(self) -> jax.stages.Lowered:
        """Trace it."""
        jitted = jax.jit(self.step, donate_argnums=self.donated, keep_unused=self.keeps_unused)
        return jitted.lower(*self.arguments)

    def compile(self) -> jax.stages.Compiled:
        """Trace and compile it."""
        return self.lower().compile(self.options)

    def describe(self) -> str:
        """Say all of it but `step`."""
        leaves, tree = jax.tree.flatten(self.arguments)
        arrays = [(x.shape, x.dtype.name, getattr(x, "weak_type", False)) for x in leaves]
        results = jax.tree.structure(self.result)
        rest = (self.donated, self.keeps_unused, sorted(self.options.items()))
        return repr((arrays, tree, results, *rest))


class _Asked(threading.local):
    """What XLA's cache said to this thread: programs that it compiled, and that it was given.

    Only what was compiled can be kept: what was loaded has lost, on a CPU, what it takes to write
    it again, and fails when it is run.
    """

    misses = 0
    hits = 0


_asked = _Asked()


@functools.cache
def _listen() -> None:
    def note(event: str, **_: str | int) -> None:
        _asked.misses += event == "/jax/compilation_cache/cache_misses"
        _asked.hits += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(note)


class KeptPrograms:
    """One folder of them, of any number of engines and versions."""

    def __init__(self, folder: Path, surroundings: str, max_bytes: int = MAX_BYTES) -> None:
        """`folder` must be private (see `open_kept`): what is in it is run."""
        self._folder = folder
        self._surroundings = surroundings
        self._max_bytes = max_bytes
        _listen()

    def get(self, described: str, program: Program) -> jax.stages.Compiled:
        """Load a program, or compile and keep it.

        `described` must tell its `step` from all others that this version of SwiftJAX can make.
        """
        key = self._key(described, program)
        found = self._load(key, program)
        if found is None:
            misses, hits = _asked.misses, _asked.hits
            found = program.compile()
            if _asked.misses > misses and _asked.hits == hits:
                self._keep(key, program, found)
        return found

    def _key(self, described: str, program: Program) -> str:
        text = "\n".join([self._surroundings, settings(), described, program.describe()])
        return hashlib.sha256(text.encode()).hexdigest()

    def _load(self, key: str, program: Program) -> jax.stages.Compiled | None:
        try:
            content = self._read(key)
            payload = content[_DIGEST_BYTES:]
            if content[:_DIGEST_BYTES] != _digest(key, payload):
                return None
            return deserialize_and_load(
                payload,
                jax.tree.structure((program.arguments, {})),
                jax.tree.structure(program.result),
                execution_devices=jax.devices()[:1],
            )
        except FileNotFoundError:
            return None
        except Exception:
            # Whatever is wrong with a file, it is worth no more than the time to compile.
            logger.info("a kept program can't be used and is compiled again", exc_info=True)
            return None

    def _read(self, key: str) -> bytes:
        descriptor = os.open(self._folder / key, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise PermissionError(f"{file.name} is not this user's alone")
            with suppress(OSError):  # of a file system that is only read
                os.utime(descriptor)  # so that it is not the oldest
            return file.read()

    def _keep(self, key: str, program: Program, compiled: jax.stages.Compiled) -> None:
        try:
            payload, arguments, result = serialize(compiled)
            assert arguments == jax.tree.structure((program.arguments, {}))
            assert result == jax.tree.structure(program.result)
            self._write(key, _digest(key, payload) + payload)
            self._make_room()
        except Exception:
            # The program is there and runs; that the next start makes it again is no error.
            logger.info("a program can't be kept for the next start", exc_info=True)

    def _write(self, key: str, content: bytes) -> None:
        """Whole or not at all; who reads it checks it, so it need not be flushed."""
        descriptor, name = tempfile.mkstemp(dir=self._folder)  # readable by this user alone
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(name, self._folder / key)
        except BaseException:
            os.unlink(name)
            raise

    def _make_room(self) -> None:
        """Delete the oldest files, also what a killed process left, while there are too many."""
        found = []
        for entry in os.scandir(self._folder):
            try:
                found.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
            except FileNotFoundError:
                continue  # another process makes room too
        excess = sum(size for _, size, _ in found) - self._max_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            Path(path).unlink(missing_ok=True)
            excess -= size


def open_kept(folder: Path) -> KeptPrograms | None:
    """Make or find the folder; None, with the reason logged, where it can't be trusted or used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve(strict=True)
        unsafe = next((path for path in (folder, *folder.parents) if not is_private(path)), None)
    except OSError as error:
        logger.info("no programs are kept for the next start: %s", error)
        return None
    if unsafe is not None:
        logger.warning(
            "no programs are kept for the next start, which will be slower: other users can write "
            "to %s; take that right away (chmod go-w) or set XDG_CACHE_HOME",
            unsafe,
        )
        return None
    try:
        described = surroundings()
    except Exception:
        # A source that cannot be read, say. Whatever it is, an engine starts without all this.
        logger.info("no programs are kept for the next start", exc_info=True)
        return None
    return None if described is None else KeptPrograms(folder, described)


def _digest(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + payload).digest()

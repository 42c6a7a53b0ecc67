"""Copies of pages outside the device: in host memory up to a limit, the oldest beyond it on disk.

A copy is a list of chunks, each a pytree of arrays; nothing here knows what is in them. Files are
written on a thread and have no names, so they end with this process, however that ends. Held by the
runner.
"""

import logging
import math
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from swiftjax.errors import InvalidRequestError

logger = logging.getLogger(__name__)


class _OnDisk:
    """A copy that was sent to a file; its chunks stay until they are written."""

    def __init__(self, folder: Path, chunks: list[Any]) -> None:
        self._folder = folder
        self._leaves, self._structure = jax.tree.flatten(chunks)
        self._specs = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in self._leaves]
        self._file: IO[bytes] | None = None
        self.written: Future[None] | None = None

    def write(self) -> None:
        """Write the file; where that fails the copy is lost, as memory for it was not promised."""
        try:
            file = _open(self._folder)
            weakref.finalize(self, file.close)
            for leaf in self._leaves:
                file.write(np.asarray(leaf).tobytes())
            file.flush()
            self._file = file
        except OSError as error:
            logger.warning("pages could not be written and will be computed again: %s", error)
        self._leaves = []

    def read(self) -> list[Any] | None:
        """The chunks as they were; None when they are lost."""
        assert self.written is not None
        if not (leaves := self._leaves):  # else they are not written yet
            self.written.result()
            if self._file is None:
                return None
            try:
                leaves = self._read(self._file)
            except OSError as error:
                logger.warning("pages could not be read and will be computed again: %s", error)
                return None
        return jax.tree.unflatten(self._structure, leaves)

    def remove(self) -> None:
        """Give the file up, once it is written."""
        assert self.written is not None
        self.written.add_done_callback(lambda _: self._file and self._file.close())

    def _read(self, file: IO[bytes]) -> list[np.ndarray]:
        file.seek(0)
        leaves = []
        for shape, dtype in self._specs:
            size = math.prod(shape) * dtype.itemsize
            data = file.read(size)
            if len(data) < size:
                raise OSError("the file was cut")
            leaves.append(np.frombuffer(data, dtype).reshape(shape))
        return leaves


class PageCopies:
    """Copies by key."""

    def __init__(self, host_bytes: float = math.inf, folder: Path | None = None) -> None:
        """With a `folder` there are files. Raises InvalidRequestError."""
        self._host_bytes = host_bytes
        self._in_memory: dict[str, list[Any]] = {}  # the oldest first
        self._on_disk: dict[str, _OnDisk] = {}
        self._fetched: dict[str, list[Any]] = {}
        self._num_bytes = 0
        self._folder = folder
        self._writer = ThreadPoolExecutor(max_workers=1)
        if folder is not None:
            try:
                _open(folder).close()
            except OSError as error:
                raise InvalidRequestError(
                    f"cannot write to the session folder {folder}: {error.strerror}"
                ) from error

    @property
    def num_on_disk(self) -> int:
        """Copies that lie in files."""
        return len(self._on_disk)

    def put(self, key: str, chunks: list[Any]) -> None:
        """Keep a copy; older ones may have to leave memory."""
        self._in_memory[key] = chunks
        self._num_bytes += _size(chunks)
        while self._folder is not None and self._num_bytes > self._host_bytes:
            oldest = next(iter(self._in_memory))
            self._to_disk(oldest, self._in_memory.pop(oldest), self._folder)

    def fetch(self, key: str) -> bool:
        """Have a copy in memory until `forget_fetched`; False when it is lost.

        One that is not known will be put in time.
        """
        chunks = self._in_memory.get(key)
        if key in self._on_disk:
            chunks = self._on_disk[key].read()
            if chunks is None:
                return False
        if chunks is not None:
            self._fetched[key] = chunks
        return True

    def get(self, key: str) -> list[Any]:
        """The chunks of a copy, which stays; one on disk must have been fetched."""
        return self._fetched[key] if key in self._fetched else self._in_memory[key]

    def drop(self, key: str) -> None:
        """Forget a copy."""
        if (chunks := self._in_memory.pop(key, None)) is not None:
            self._num_bytes -= _size(chunks)
        else:
            self._on_disk.pop(key).remove()

    def forget_fetched(self) -> None:
        """Nobody needs what was fetched any more."""
        self._fetched = {}

    def _to_disk(self, key: str, chunks: list[Any], folder: Path) -> None:
        self._num_bytes -= _size(chunks)
        self._on_disk[key] = copy = _OnDisk(folder, chunks)
        copy.written = self._writer.submit(copy.write)


def _open(folder: Path) -> IO[bytes]:
    """A file that nobody else can find, alter or leave behind."""
    return tempfile.TemporaryFile(prefix="swiftjax-pages-", dir=folder)


def _size(chunks: list[Any]) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(chunks))

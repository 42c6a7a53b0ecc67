"""Copies of pages outside the device: in host memory up to a limit, the oldest beyond it on disk.

A copy is a list of chunks, each a pytree of arrays; nothing here knows what is in them. Files are
written on a thread and belong to this process, which removes them. Held by the runner.
"""

import logging
import math
import shutil
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swiftjax.errors import InvalidRequestError

logger = logging.getLogger(__name__)


class _OnDisk:
    """A copy that was sent to a file; its chunks stay until they are written."""

    def __init__(self, path: Path, chunks: list[Any]) -> None:
        self._path = path
        self._leaves, self._structure = jax.tree.flatten(chunks)
        self._specs = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in self._leaves]
        self.written: Future[None] | None = None

    def write(self) -> None:
        """Write the file; where that fails the chunks stay in memory."""
        try:
            with self._path.open("wb") as file:
                for leaf in self._leaves:
                    file.write(np.asarray(leaf).tobytes())
        except OSError as error:
            logger.warning("session pages stay in memory: %s", error)
            self._path.unlink(missing_ok=True)
        else:
            self._leaves = []

    def read(self) -> list[Any]:
        """The chunks as they were."""
        assert self.written is not None
        self.written.result()
        if self._leaves:
            return jax.tree.unflatten(self._structure, self._leaves)
        data, offset, leaves = self._path.read_bytes(), 0, []
        for shape, dtype in self._specs:
            count = math.prod(shape)
            leaves.append(np.frombuffer(data, dtype, count, offset).reshape(shape))
            offset += count * dtype.itemsize
        return jax.tree.unflatten(self._structure, leaves)

    def remove(self) -> None:
        """Delete the file, once it is written."""
        assert self.written is not None
        self.written.add_done_callback(lambda _: self._path.unlink(missing_ok=True))


class PageCopies:
    """Copies by key."""

    def __init__(self, host_bytes: float = math.inf, folder: Path | None = None) -> None:
        """With a `folder`, files go to a new folder in it. Raises InvalidRequestError."""
        self._host_bytes = host_bytes
        self._in_memory: dict[str, list[Any]] = {}  # the oldest first
        self._on_disk: dict[str, _OnDisk] = {}
        self._num_bytes = 0
        self._num_files = 0
        self._folder: Path | None = None
        self._writer = ThreadPoolExecutor(max_workers=1)
        if folder is not None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="swiftjax-pages-", dir=folder))
            except OSError as error:
                raise InvalidRequestError(
                    f"cannot write to the session folder {folder}: {error.strerror}"
                ) from error
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

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

    def get(self, key: str) -> list[Any]:
        """The chunks of a copy, which stays."""
        found = self._in_memory.get(key)
        return self._on_disk[key].read() if found is None else found

    def drop(self, key: str) -> None:
        """Forget a copy."""
        if (chunks := self._in_memory.pop(key, None)) is not None:
            self._num_bytes -= _size(chunks)
        else:
            self._on_disk.pop(key).remove()

    def _to_disk(self, key: str, chunks: list[Any], folder: Path) -> None:
        self._num_bytes -= _size(chunks)
        self._num_files += 1
        self._on_disk[key] = copy = _OnDisk(folder / str(self._num_files), chunks)
        copy.written = self._writer.submit(copy.write)


def _size(chunks: list[Any]) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(chunks))

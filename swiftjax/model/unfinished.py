"""A directory that appears whole or not at all, and whose filling goes on after a kill.

It is filled beside its destination, with a journal of what is done, and put in place by one rename.
Knows nothing of what is in it. Used by `checkpoint`.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from swiftjax.disk import sync
from swiftjax.errors import CheckpointError

JOURNAL, LOCK, CONTENT = "journal", "lock", "content"
NAMES = {JOURNAL, LOCK, CONTENT}


class Unfinished:
    """What is there of a directory; `folder` is to be filled, `entries` say what is done."""

    def __init__(self, partial: Path, plan: str) -> None:
        self.folder = partial / CONTENT
        self._journal = partial / JOURNAL
        self.entries = self._read(plan)
        if not self.entries:
            self._begin(plan)

    def record(self, path: Path, entry: dict[str, Any]) -> None:
        """Remember for ever that `path` inside the folder is done."""
        sync_tree(path)
        sync(path.parent)
        self.entries.append(entry)
        self._append(entry)

    def _read(self, plan: str) -> list[dict[str, Any]]:
        """The entries of an earlier process; nothing if it had another plan or left no sense."""
        try:
            text = self._journal.read_bytes()
            # A last line without its end was cut by the kill: it was not done yet.
            whole = text[: text.rfind(b"\n") + 1]
            first, *entries = [json.loads(line) for line in whole.splitlines()]
        except (OSError, ValueError):
            return []
        if first != {"plan": plan} or not self.folder.is_dir():
            return []
        os.truncate(self._journal, len(whole))
        return entries

    def _begin(self, plan: str) -> None:
        self._journal.unlink(missing_ok=True)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir()
        self._append({"plan": plan})

    def _append(self, entry: dict[str, Any]) -> None:
        with self._journal.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def unfinished_directory(destination: Path, plan: str, *, replace: bool) -> Iterator[Unfinished]:
    """Yield what is there of `destination`, and put it in place when the block ends.

    An earlier process that was killed or interrupted left its work in a hidden `.NAME.partial`
    beside it: that is continued if it had the same `plan`. After an error nothing is left. With
    `replace` an existing directory is renamed aside first and deleted last. Raises OSError, and
    CheckpointError while another process is at it.
    """
    with _held(destination) as partial:
        try:
            work = Unfinished(partial, plan)
            yield work
            sync_tree(work.folder)
            _publish(work.folder, destination, replace=replace)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(partial, ignore_errors=True)


def recover(destination: Path, is_ours: Callable[[Path], bool]) -> None:
    """Finish or undo the replacement during which a process was killed.

    A directory left aside that `is_ours` is put back or, if the new one is in place, deleted.
    Raises CheckpointError while another process is at it, and for a stranger in its place.
    """
    aside = _aside(destination)
    if not _partial(destination).exists() and not os.path.lexists(aside):
        return
    with _held(destination) as partial:
        if os.path.lexists(aside) and (aside.is_symlink() or not is_ours(aside)):
            raise CheckpointError(f"{aside} stands where a replaced checkpoint is kept: remove it")
        if aside.exists() and destination.exists():
            shutil.rmtree(aside)
        elif aside.exists():
            aside.rename(destination)
        if not (partial / CONTENT).exists():  # was put in place
            shutil.rmtree(partial)


def bytes_left(destination: Path) -> int:
    """Bytes that an earlier process left: they are continued, or make room."""
    size = 0
    for base, _, names in os.walk(_partial(destination)):
        for name in names:
            with suppress(FileNotFoundError):  # another process is at it
                size += (Path(base) / name).lstat().st_size
    return size


@contextmanager
def _held(destination: Path) -> Iterator[Path]:
    """Give the hidden directory, locked; the lock ends with the process, however that ends."""
    partial = _partial(destination)
    if partial.is_symlink() or (partial.exists() and set(os.listdir(partial)) - NAMES):
        raise CheckpointError(f"{partial} stands where unfinished work is kept: remove it")
    partial.mkdir(exist_ok=True)
    with (partial / LOCK).open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is writing {destination}: wait for it"
            ) from error
        yield partial


def _partial(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.partial")


def _aside(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.old")


def _publish(folder: Path, destination: Path, *, replace: bool) -> None:
    aside = _aside(destination)
    if replace and destination.exists():
        destination.rename(aside)
    try:
        folder.rename(destination)
    except BaseException:
        if aside.exists():
            aside.rename(destination)
        raise
    sync(destination.parent)
    if replace:
        shutil.rmtree(aside, ignore_errors=True)


def sync_tree(root: Path) -> None:
    """Flush a directory and all that is in it to disk."""
    for base, _, files in os.walk(root, topdown=False):
        for path in (*(Path(base) / name for name in files), Path(base)):
            sync(path)

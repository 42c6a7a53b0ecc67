"""Make a directory appear whole or not at all.

It is filled beside its destination, flushed to disk and put in place by one rename. Knows nothing
of what is in it. Used by `checkpoint`.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_directory(destination: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a new directory beside `destination`, and rename it to that when the block ends.

    After an exception nothing is left of it. With `replace` an existing directory is renamed aside
    first and deleted last, and comes back if the second rename fails. A process that is killed
    leaves at most hidden `.NAME.tmp-*` or `.NAME.old-*` siblings. Raises OSError.
    """
    temporary = destination.with_name(f".{destination.name}.tmp-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _publish(temporary, destination, replace=replace)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already if it was published


def _publish(temporary: Path, destination: Path, *, replace: bool) -> None:
    aside = destination.with_name(f".{destination.name}.old-{uuid.uuid4().hex}")
    if replace and destination.exists():
        destination.rename(aside)
    try:
        temporary.rename(destination)
    except BaseException:
        if aside.exists():
            aside.rename(destination)
        raise
    _sync(destination.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync_tree(root: Path) -> None:
    for base, _, files in os.walk(root, topdown=False):
        for path in (*(Path(base) / name for name in files), Path(base)):
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

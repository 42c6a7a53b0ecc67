"""Loads a model for a command and shows how far it is, on stderr.

A terminal gets a bar; a file or a pipe gets one plain line when a stage ends, and before that one
every half minute.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from swiftjax.cli.reporting import print_line
from swiftjax.config import EngineConfig
from swiftjax.errors import InvalidRequestError
from swiftjax.garbage import spare_loaded

if TYPE_CHECKING:
    from swiftjax.build import BuiltCore

Progress = Callable[[int, int], None]  # (done, in all)
SECONDS_PER_LINE = 30.0


@contextmanager
def progress(label: str, *, quiet: bool, in_bytes: bool = False) -> Iterator[Progress | None]:
    """Show the progress of one stage while the context lasts; None when quiet.

    Bytes are shown beside the time, and how many of them a second.
    """
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar(label, in_bytes) as report:
            yield report
    else:
        lines = _Lines(label)
        yield lines.take
        seconds, size = time.monotonic() - lines.started, lines.done / 1e6
        rate = f", {size:,.0f} MB, {size / seconds:,.0f} MB/s" if in_bytes else ""
        print_line(f"{label}: {seconds:.1f} s{rate}")


class _Lines:
    """Progress where lines cannot be overwritten."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.started = self._told = time.monotonic()
        self.done = 0

    def take(self, done: int, total: int) -> None:
        """Remember how far it is, and say so if nothing was said for long."""
        self.done, now = done, time.monotonic()
        if now - self._told >= SECONDS_PER_LINE:
            self._told = now
            print_line(f"{self._label}: {done / total:.0%} after {now - self.started:.0f} s")


@contextmanager
def _bar(label: str, in_bytes: bool) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        *((DownloadColumn(), TransferSpeedColumn()) if in_bytes else ()),
        TimeElapsedColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def load_core(config: EngineConfig, *, warm: bool, quiet: bool) -> "BuiltCore":
    """Load the model; `warm` also compiles every step, so that no request has to wait for that."""
    from swiftjax.converters.demo_model import resolve_model

    # Before jax is imported, which takes seconds: a mistyped path should be told at once.
    if config.load_format != "dummy":
        resolve_model(config.model_path)
    from swiftjax.build import build_core

    with progress(f"loading {config.model_path}", quiet=quiet, in_bytes=True) as report:
        built = build_core(config, report, warms_up=warm)
    if warm:
        with progress("compiling", quiet=quiet) as report:
            built.warm_up(report)
    spare_loaded()
    return built


def read_chat_template(path: Path | None) -> str | None:
    """Read the file of --chat-template."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"cannot read the chat template {path}: {error}") from error

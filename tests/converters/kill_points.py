"""Conversions that are killed at random moments, in forks of one process that never ran jax.

    python -m tests.converters.kill_points FOLDER KILLS SEED

prints one JSON object for `test_convert_failures`. A fork costs a fraction of what a new process
would, and is killed by SIGKILL like any other.
"""

import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swiftjax.converters.convert import convert
from swiftjax.converters.load import load_checkpoint
from swiftjax.errors import CheckpointError
from swiftjax.model import param_files
from swiftjax.model.checkpoint_writer import check_destination
from tests.tiny_checkpoints import tiny_config, write_checkpoint

SAME_BYTES = ("manifest.json", "config.json", "tokenizer.json", "tokenizer_config.json")
KILLS_PER_CONVERSION = 12


def fork(work: Callable[[], object]) -> int:
    """Do the work in a process of its own, which ends with 0 if it was done."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def num_recorded(destination: Path) -> int:
    """Groups that the journal beside a destination counts as done."""
    journal = destination.with_name(f".{destination.name}.partial") / "journal"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


class Killer:
    """Converts one model again and again, and kills it."""

    def __init__(self, folder: Path, most_kills: int, seed: int) -> None:
        self.folder, self.most_kills, self.rng = folder, most_kills, random.Random(seed)
        self.source = write_checkpoint(folder / "hf", tiny_config())
        self.kills = self.continued = 0
        self.problems: list[str] = []

    def prepare(self) -> None:
        """The uninterrupted conversion, and an older checkpoint to be replaced."""
        start = time.monotonic()
        assert wait(fork(lambda: convert(self.source, self.folder / "whole", dtype=None))) == 0
        self.seconds = time.monotonic() - start
        old = self.folder / "old"
        assert wait(fork(lambda: convert(self.source, old, dtype="bfloat16"))) == 0
        self.manifests = [(self.folder / x / "manifest.json").read_text() for x in ("whole", "old")]

    def convert_with_kills(self, destination: Path, *, replaces: bool) -> None:
        """Start, kill, start again; the last one is left to end."""
        if replaces:
            shutil.copytree(self.folder / "old", destination)
        for kills_left in reversed(range(KILLS_PER_CONVERSION)):
            before = num_recorded(destination)
            self.continued += before > 1
            work = lambda: convert(self.source, destination, dtype=None, force=replaces)  # noqa: E731
            pid = fork(work)
            if kills_left and not self.is_enough():
                # Mostly early: a rerun has less to do than the first run, whose time this is.
                time.sleep(self.rng.uniform(0, self.seconds * self.rng.choice((0.5, 0.5, 1.0))))
                os.kill(pid, signal.SIGKILL)
            code = wait(pid)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                self.problems.append(f"{destination.name}: a rerun ended with {code}")
                break
            self.kills += 1
            self.check_after_kill(destination, before)
            if self.is_whole(destination):
                # A rerun only has to tidy up.
                check_destination(destination, force=True)
                break
        self.compare(destination)

    def is_enough(self) -> bool:
        """Killed as often as asked; many of them while they went on with earlier work.

        On a busy machine more kills than usual come before the first group is written.
        """
        is_asked = self.kills >= self.most_kills and self.continued >= self.most_kills // 5
        return is_asked or self.kills >= 3 * self.most_kills

    def is_whole(self, destination: Path) -> bool:
        manifest = destination / "manifest.json"
        return manifest.exists() and manifest.read_text() == self.manifests[0]

    def check_after_kill(self, destination: Path, before: int) -> None:
        """No work is lost, and what stands at the destination is whole, old or new."""
        if 0 < num_recorded(destination) < before:
            self.problems.append(f"{destination.name}: {before} groups became fewer")
        manifest = destination / "manifest.json"
        if destination.exists() and manifest.read_text() not in self.manifests:
            self.problems.append(f"{destination.name}: neither the old nor the new manifest")

    def compare(self, destination: Path) -> None:
        """The same bytes as without a kill; the manifest has the hash of every tensor."""
        for name in SAME_BYTES:
            if (destination / name).read_bytes() != (self.folder / "whole" / name).read_bytes():
                self.problems.append(f"{destination.name}: another {name}")

    def check_loading(self, count: int) -> None:
        """Load all of them: every tensor is hashed, and compared with the manifest."""

        def work() -> None:
            for number in range(count):
                load_checkpoint(self.folder / f"n{number}", dtype=None)

        if wait(fork(work)) != 0:
            self.problems.append("one of the conversions does not load")

    def full_disk(self) -> str:
        """The error of a process that may not make files of more than 10 kB."""

        def work() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            try:
                convert(self.source, self.folder / "full", dtype=None)
            except CheckpointError as error:
                os.write(write, str(error).encode())

        read, write = os.pipe()
        pid = fork(work)
        os.close(write)
        message = os.read(read, 1000).decode()
        wait(pid)
        return message


def main() -> None:
    """Kill as often as asked, then say how it went."""
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    param_files.GROUP_BYTES = 6_000
    gc.freeze()  # so that forks copy less
    killer = Killer(folder, kills, seed)
    killer.prepare()
    report: dict[str, Any] = {"full disk": killer.full_disk()}
    number = 0
    while not killer.is_enough() and not killer.problems:
        killer.convert_with_kills(folder / f"n{number}", replaces=number % 3 == 2)
        number += 1
    killer.check_loading(number)
    report |= {"kills": killer.kills, "continued": killer.continued, "problems": killer.problems}
    print(json.dumps(report | {"left": sorted(os.listdir(folder)), "conversions": number}))


if __name__ == "__main__":
    main()

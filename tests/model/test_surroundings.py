"""What kept programs are made from, and where they are kept."""

import dataclasses
import errno
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from swiftjax import disk, sizing
from swiftjax.model.assembly import make_programs
from swiftjax.model.kept_programs import open_kept
from swiftjax.model.surroundings import source_hash, surroundings
from tests.tiny import TINY

SIZES: dict[str, Any] = {"max_num_seqs": 5, "num_pages": 8, "page_size": 4}


@pytest.mark.parametrize(
    "change",
    [{"implementation": "reference"}, {"max_model_len": 128}, {"row_invariant": True},
     {"config": dataclasses.replace(TINY, rms_norm_eps=0.5)}],
)  # fmt: skip
def test_models_are_told_apart(change: dict[str, Any]) -> None:
    """By what is not in the shapes of their arguments."""
    sizes: dict[str, Any] = {**SIZES, "config": TINY, "max_model_len": 64, "implementation": "xla"}
    one, same, other = (
        make_programs(**kwargs).model.describe() for kwargs in (sizes, sizes, sizes | change)
    )
    assert one == same != other
    assert " at 0x" not in one


def test_only_private_folders_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftjax.model.kept_programs.surroundings", lambda: "here")
    folder = tmp_path / "cache" / "programs"
    assert open_kept(folder) is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    for shared in (folder, folder.parent):
        shared.chmod(0o707)
        assert open_kept(folder) is None
        assert str(shared) in caplog.records[-1].getMessage()
        shared.chmod(0o700)
    (tmp_path / "file").write_text("")
    assert open_kept(tmp_path / "file" / "programs") is None
    monkeypatch.setattr("swiftjax.model.kept_programs.surroundings", lambda: None)
    assert open_kept(folder) is None


def make_group_folder(
    at: Path, patch: pytest.MonkeyPatch, name: str = "ann", members: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
) -> Path:  # fmt: skip
    """One that a group may write to; it is the first group of ann and of `others`."""
    folder = at / "cache"
    folder.mkdir()
    folder.chmod(0o775)
    group, gid = SimpleNamespace(gr_name=name, gr_mem=members), folder.stat().st_gid
    users = [SimpleNamespace(pw_name=user, pw_gid=gid) for user in ("ann", *others)]
    patch.setattr(disk.grp, "getgrgid", lambda gid: group)
    patch.setattr(disk.pwd, "getpwuid", lambda uid: users[0])
    patch.setattr(disk.pwd, "getpwall", lambda: [*users, SimpleNamespace(pw_name="x", pw_gid=-2)])
    return folder


@pytest.mark.parametrize(
    ("name", "members", "others", "is_private"),
    [("ann", (), (), True), ("ann", ("ann",), (), True), ("ann", ("bob",), (), False),
     ("ann", (), ("bob",), False), ("staff", (), (), False)],
)  # fmt: skip
def test_a_group_of_ones_own_may_write(
    tmp_path: Path,
    name: str,
    members: tuple[str, ...],
    others: tuple[str, ...],
    is_private: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where every user has one and the umask is 002, every folder is writable by it."""
    folder = make_group_folder(tmp_path, monkeypatch, name, members, others)
    assert disk.is_private(folder) == is_private
    folder.chmod(0o777)
    assert not disk.is_private(folder)


def test_a_list_of_other_users_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's bits then stand for the most that anybody on it may do."""
    folder = make_group_folder(tmp_path, monkeypatch)
    nobody, none = 65534, 2**32 - 1
    entries = [(1, 7, none), (2, 7, nobody), (4, 5, none), (16, 7, none), (32, 0, none)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    folder.chmod(0o770)
    try:
        os.setxattr(folder, "system.posix_acl_access", packed)
    except OSError as error:
        assert error.errno == errno.ENOTSUP, error
        # This file system has no such lists: what one that has would say.
        monkeypatch.setattr(disk.os, "getxattr", lambda path, name: packed)
    assert folder.stat().st_mode & 0o777 == 0o770
    assert not disk.is_private(folder)


def test_what_cannot_be_told_keeps_no_engine_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock file of an editor is a link to nothing whose name ends in .py."""
    (tmp_path / ".#a.py").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr("swiftjax.model.surroundings.PACKAGE", tmp_path)
    assert open_kept(tmp_path / "programs") is None


def test_sources_that_change_change_the_key(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    one = tmp_path / "inner" / "a.py"
    one.write_text("x = 1\n")
    late = one.stat().st_ctime + 10_000  # whenever what follows is written
    first = source_hash(tmp_path, late)
    assert first is not None and source_hash(tmp_path, late) == first
    one.write_text("x = 2\n")
    assert source_hash(tmp_path, late) not in (first, None)
    one.write_text("x = 1\n")
    one.rename(tmp_path / "inner" / "b.py")
    assert source_hash(tmp_path, late) not in (first, None)
    assert source_hash(tmp_path, one.parent.stat().st_ctime - 10) is None


def test_flags_and_versions_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftjax.model.surroundings.source_hash", lambda *_: "sources")
    before = surroundings()
    assert before is not None and before == surroundings() and jax.__version__ in before
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    flagged = surroundings()
    monkeypatch.setattr(jax, "__version__", "what was imported before it was replaced")
    assert len({before, flagged, surroundings()}) == 3


def test_nothing_is_kept_where_the_user_chose_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "open_kept", lambda folder: folder)
    ours = sizing._own_cache()
    values = jax.config.values
    for change, is_kept in [
        ({"jax_compilation_cache_dir": ours}, True),
        ({"jax_compilation_cache_dir": "elsewhere"}, False),
        ({"jax_compilation_cache_dir": ours, "jax_enable_compilation_cache": False}, False),
        ({"jax_compilation_cache_dir": ours, "jax_default_device": jax.devices()[0]}, False),
    ]:
        changed = {**values, **change}
        monkeypatch.setattr(type(jax.config), "values", property(lambda _, v=changed: v))
        assert (sizing.kept_programs() is not None) == is_kept

"""What the file system promises: that files are on the disk, and that they are nobody else's."""

import grp
import os
import pwd
import stat
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_private(path: Path) -> bool:
    """Whether nobody but this user and root can replace what is at a path, or in it if a folder.

    Says nothing of the folders above. Raises OSError.
    """
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return False
    # In a folder with the sticky bit, such as /tmp, nobody touches what is someone else's.
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return True
    others = stat.S_IWOTH if _is_own_group(status.st_gid) else stat.S_IWGRP | stat.S_IWOTH
    return not status.st_mode & others


def _is_own_group(gid: int) -> bool:
    """Whether a group is this user's alone, as where every user has one and the umask is 002."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    is_users = user.pw_gid == gid and group.gr_name == user.pw_name
    return is_users and set(group.gr_mem) <= {user.pw_name}

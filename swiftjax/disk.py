"""What the file system promises: that files are on the disk, and that they are nobody else's."""

import errno
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
    if not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return True
    is_groups_alone = not status.st_mode & stat.S_IWOTH and not _has_access_list(path)
    return is_groups_alone and _is_own_group(status.st_gid)


def _has_access_list(path: Path) -> bool:
    """Whether the group's bits are the most that a list grants to anybody, not the group's own."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP)


def _is_own_group(gid: int) -> bool:
    """Whether a group is this user's alone, as where every user has one and the umask is 002."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    is_users = user.pw_gid == gid and group.gr_name == user.pw_name
    # Whose first group it is need not be among its members.
    members = {*group.gr_mem, *(other.pw_name for other in pwd.getpwall() if other.pw_gid == gid)}
    return is_users and members <= {user.pw_name}

"""Room for connections: each takes a file, and shells allow a process 1,024 by default."""

import resource

MAX_FILES = 65_536


def raise_file_limit() -> None:
    """Allow this process, and those it starts, as many open files as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

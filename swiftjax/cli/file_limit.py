"""Room for connections: each takes a file, and shells allow a process 1,024 by default."""

import resource

MAX_FILES = 65_536
OWN_FILES = 128  # for everything else: ports, pipes, an engine or a template worker started again


def raise_file_limit() -> int:
    """Allow this process, and those it starts, as many open files as it may have.

    Gives the connections that each of its two ports may have then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, (wanted - OWN_FILES) // 2)

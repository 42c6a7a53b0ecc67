"""Keeps Python's collector of garbage away from what a process holds for good.

For processes of our own only: of what is spared, cycles that are dropped later stay. A library in
somebody else's process leaves the collector alone. Called by the CLI and by the server.
"""

import gc


def spare_loaded() -> None:
    """Let the collector see only what comes from now on: not much, and most of it dies.

    To look through all that was loaded takes 20 ms in a front end and 350 ms in an engine, in which
    no stream gets anything.
    """
    gc.unfreeze()  # what was loaded before may be garbage now
    gc.collect()
    gc.freeze()

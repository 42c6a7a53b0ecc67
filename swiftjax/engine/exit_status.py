"""How a process ended, in words. Called by `process_link.py`."""

import signal


def how_it_ended(status: int) -> str:
    """Say what a return code of `subprocess` means."""
    if status >= 0:
        return f"status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"

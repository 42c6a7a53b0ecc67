"""What systemd is told of a service of Type=notify; elsewhere nobody listens."""

import os
import socket


def notify(state: str) -> None:
    """Tell a state, e.g. `READY=1`, if systemd asked for that."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        # An address that starts with @ stands for one without a file, which starts with NUL.
        sender.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
        sender.sendall(state.encode())

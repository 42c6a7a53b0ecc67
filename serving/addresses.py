"""What an address says about who is on its other side; looks nothing up.

Used by the server, which is careful beyond this machine, and by the client.
"""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""How a running sequence gives up its pages: swapped to host memory, or computed again later.

The cheaper of the two by measured speeds; recompute when the host has no room. Plain numbers
only. Called by the scheduler.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionCosts:
    """Measured speeds and the room on the host. All zeros: always recompute."""

    host_pages: int = 0
    seconds_per_page: float = 0.0  # one way, between device and host
    seconds_per_token: float = 0.0  # to compute a prompt token again

    def prefers_swap(self, num_pages: int, num_tokens: int, host_pages_used: int) -> bool:
        """Whether moving out and back is cheaper than computing again, and there is room."""
        if host_pages_used + num_pages > self.host_pages:
            return False
        return 2 * num_pages * self.seconds_per_page < num_tokens * self.seconds_per_token

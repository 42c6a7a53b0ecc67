"""How much was computed for each client: what the fair policy goes by.

Counts only matter relative to each other. A client that comes (back) starts from where the others
are, so that nobody saves up a right to the whole engine by staying away. Memory is bounded: clients
come from outside. Called by the scheduler.
"""

from collections import OrderedDict

MAX_IDLE_CLIENTS = 1024


class ServedTokens:
    """`tokens` per client: of all with open requests, and of the last idle ones."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self._num_open: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # the longest idle first
        self._level = 0  # the count of the client whose request started last, when it did

    def join(self, client_id: str) -> None:
        """A request was submitted; call it before the request's key is made."""
        if client_id not in self._num_open:
            self._num_open[client_id] = 0
            self._idle.pop(client_id, None)
            self.tokens[client_id] = max(self.tokens.get(client_id, 0), self._level)
        self._num_open[client_id] += 1

    def start(self, client_id: str) -> None:
        """A request of this client had its turn."""
        self._level = max(self._level, self.tokens[client_id])

    def charge(self, client_id: str, num_tokens: int) -> None:
        """Tokens are computed for an open request."""
        self.tokens[client_id] += num_tokens

    def leave(self, client_id: str) -> None:
        """A request ended."""
        self._num_open[client_id] -= 1
        if self._num_open[client_id]:
            return
        del self._num_open[client_id]
        self._idle[client_id] = None
        if len(self._idle) > MAX_IDLE_CLIENTS:
            oldest, _ = self._idle.popitem(last=False)
            del self.tokens[oldest]

"""How much was computed for each client: what the fair policy goes by.

Counts only matter relative to each other. A client that comes (back) starts from where the others
are, so that nobody saves up a right to the whole engine by staying away. Memory is bounded: clients
come from outside. Called by the scheduler.
"""

from collections import OrderedDict
from functools import lru_cache

MAX_IDLE_CLIENTS = 1024


@lru_cache(MAX_IDLE_CLIENTS)
def owner_of(client_id: str) -> str:
    """Whose client it is: the "a" of "a/b"; its own where there is no slash."""
    return client_id.partition("/")[0]


class ServedTokens:
    """`tokens` per name: of all with open requests, and of the last idle ones."""

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


class Served:
    """Counts per client, and per owner, who could else take the turns of many clients."""

    def __init__(self) -> None:
        self.clients = ServedTokens()
        self.owners = ServedTokens()

    def join(self, client_id: str) -> None:
        """A request was submitted; call it before the request's key is made."""
        self.clients.join(client_id)
        self.owners.join(owner_of(client_id))

    def start(self, client_id: str) -> None:
        """A request of this client had its turn."""
        self.clients.start(client_id)
        self.owners.start(owner_of(client_id))

    def charge(self, client_id: str, num_tokens: int) -> None:
        """Tokens are computed for an open request; called for each sequence in each step."""
        self.clients.tokens[client_id] += num_tokens
        self.owners.tokens[owner_of(client_id)] += num_tokens

    def leave(self, client_id: str) -> None:
        """A request ended."""
        self.clients.leave(client_id)
        self.owners.leave(owner_of(client_id))

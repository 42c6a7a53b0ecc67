"""How much was computed for each client: what the fair policy goes by.

Counts only matter relative to each other. A client that had nothing waiting starts from where the
others are, so that nobody saves up a right to the whole engine by asking little for long. Memory is
bounded: clients come from outside. Called by the scheduler.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import lru_cache

MAX_IDLE_CLIENTS = 1024


@lru_cache(MAX_IDLE_CLIENTS)
def owner_of(client_id: str) -> str:
    """Whose client it is: the "a" of "a/b"; its own where there is no slash."""
    return client_id.partition("/")[0]


def _all_alike(name: str) -> str:
    return ""


class ServedTokens:
    """`tokens` per name: of all with open requests, and of the last idle ones.

    Who asks is lifted to where the others of its group are. Counts of different groups drift
    apart, so each has a level of its own while it has open requests.
    """

    def __init__(self, group_of: Callable[[str], str] = _all_alike) -> None:
        self.tokens: dict[str, int] = {}
        self._group_of = group_of
        self._num_open: Counter[str] = Counter()
        self._idle: OrderedDict[str, None] = OrderedDict()  # the longest idle first
        self._num_open_in: Counter[str] = Counter()  # by group
        # The highest count with which a request started: since the group has open ones, and ever.
        self._levels: dict[str, int] = {}
        self._highest = 0

    def join(self, name: str) -> None:
        """A request was submitted; call it before the request's key is made."""
        group = self._group_of(name)
        level = self._levels.setdefault(group, self._highest)
        if name not in self._num_open:
            self._idle.pop(name, None)
        # Does nothing for who has others waiting: where turns are fair, none starts above them.
        self.tokens[name] = max(self.tokens.get(name, 0), level)
        self._num_open[name] += 1
        self._num_open_in[group] += 1

    def start(self, name: str) -> None:
        """A request of this name had its turn."""
        group, count = self._group_of(name), self.tokens[name]
        self._levels[group] = max(self._levels[group], count)
        self._highest = max(self._highest, count)

    def leave(self, name: str) -> None:
        """A request ended."""
        group = self._group_of(name)
        self._num_open_in[group] -= 1
        if not self._num_open_in[group]:
            del self._num_open_in[group], self._levels[group]
        self._num_open[name] -= 1
        if self._num_open[name]:
            return
        del self._num_open[name]
        self._idle[name] = None
        if len(self._idle) > MAX_IDLE_CLIENTS:
            oldest, _ = self._idle.popitem(last=False)
            del self.tokens[oldest]


class Served:
    """Counts per client, and per owner, who could else take the turns of many clients."""

    def __init__(self) -> None:
        self.clients = ServedTokens(owner_of)
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

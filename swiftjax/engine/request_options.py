"""Who asks and how urgently: what a request carries besides its prompt and how to generate.

One frozen value, checked when it is made, passed along from any transport to the policies. Limits
and meanings are listed in docs/serving.md.
"""

from dataclasses import dataclass, replace

from swiftjax.engine.checks import MAX_TOKENS, check_int, check_label
from swiftjax.errors import InvalidRequestError

MAX_TIME_LIMIT = 1e9  # seconds
_LEAST_TIME = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """Raises InvalidRequestError for a value outside its range.

    A higher `priority` goes first under the priority policy; `client_id` says whose turn it is
    under the fair policy, as `client` or `owner/client`. `session_id` names the conversation, for
    policies of one's own. Cached pages are shared only between requests of equal `cache_salt`.
    `time_limit` seconds after it arrived, queued or running, a request ends with what there is and
    finish_reason "time_limit".
    """

    priority: int = 0
    client_id: str = ""
    session_id: str = ""
    cache_salt: str = ""
    time_limit: float | None = None

    def __post_init__(self) -> None:
        check_int("priority", self.priority, -MAX_TOKENS, MAX_TOKENS)
        for name in ("client_id", "session_id", "cache_salt"):
            check_label(name, getattr(self, name))
        if self.time_limit is not None:
            _check_time_limit(self.time_limit)

    def with_time_left(self, passed: float) -> "RequestOptions":
        """For a request that arrived so many seconds ago; its limit may have passed."""
        if self.time_limit is None:
            return self
        return replace(self, time_limit=max(self.time_limit - passed, _LEAST_TIME))

    def end_time(self, arrival_time: float, deadline: float | None) -> float | None:
        """When the request ends at the latest: its own limit or the deadline of its call."""
        if self.time_limit is None:
            return deadline
        limit = arrival_time + self.time_limit
        return limit if deadline is None else min(limit, deadline)


def _check_time_limit(value: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_TIME_LIMIT:
        raise InvalidRequestError(
            f"time_limit is {value!r:.80}; it must be a positive number of seconds, at most "
            f"{MAX_TIME_LIMIT:g}"
        )


NO_OPTIONS = RequestOptions()

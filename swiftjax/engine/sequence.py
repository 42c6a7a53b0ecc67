"""The engine's mutable record of one request.

Only the scheduler changes a Sequence. Invariant: `0 <= computed_len <= total_len`, and
`len(page_ids) == ceil(computed_len / page_size)` between steps.
"""

from typing import Literal

from swiftjax.engine.request import FinishReason, Request

SequenceState = Literal["waiting", "running", "finished"]


class Sequence:
    """Tokens, pages and progress of one request."""

    __slots__ = ("computed_len", "page_ids", "request", "row", "state", "token_ids")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.page_ids: list[int] = []
        self.computed_len = 0
        self.row = -1  # its row in the RowTable while it runs
        self.state: SequenceState = "waiting"

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def total_len(self) -> int:
        """Prompt plus output tokens so far."""
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are not in the cache yet; 1 for a decode."""
        return self.total_len - self.computed_len

    @property
    def max_cached_len(self) -> int:
        """Most tokens the cache will ever hold for it: the last sampled token is never fed back."""
        return self.prompt_len + self.request.max_new_tokens - 1

    def finish_reason(self) -> FinishReason | None:
        """Whether the newest token ends the answer."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        if self.total_len - self.prompt_len >= self.request.max_new_tokens:
            return "length"
        return None

"""The engine's mutable record of one request.

Only the scheduler and its parts change a Sequence. Invariants: `0 <= computed_len <= total_len`;
while it runs it owns `ceil(computed_len / page_size) - num_dropped` pages and one row; in other
states neither.
"""

from typing import Literal

from swiftjax.engine.request import FinishReason, Request, TopLogprobs
from swiftjax.engine.token_rules import make_rules

# forking: waits for pages of another choice of its request.
# preempted: its tokens are kept; its pages are on the host ("swapped") or must be computed again.
SequenceState = Literal["waiting", "forking", "running", "swapped", "preempted", "finished"]


class Sequence:
    """Tokens, pages and progress of one request."""

    __slots__ = (
        "computed_len",
        "full_len",
        "max_pages",
        "num_cached",
        "num_dropped",
        "num_published",
        "num_swapped",
        "num_to_score",
        "num_unread",
        "order",
        "page_ids",
        "page_keys",
        "prompt_len",
        "prompt_scores",
        "request",
        "row",
        "rules",
        "shared_len",
        "state",
        "streaming",
        "token_ids",
    )

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.order = order  # of submission; decides ties and victims
        self.prompt_len = len(request.prompt_token_ids)
        self.full_len = self.prompt_len + request.max_new_tokens  # then nothing is left to do
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.page_ids: list[int] = []
        self.page_keys: list[bytes] = []  # of the full pages whose tokens are known
        scores_prompt = request.generation.prompt_logprobs is not None
        self.num_to_score = self.prompt_len - 1 if scores_prompt else 0
        self.prompt_scores: list[tuple[float, TopLogprobs]] = []  # of prompt tokens 1, 2, ...
        self.rules = make_rules(request)
        self.computed_len = 0
        # Prompt tokens found in the prefix cache when it first started.
        self.num_cached: int | None = None
        self.max_pages = 0  # most pages it may own at a time
        self.num_dropped = 0  # pages behind those of its sinks that it has given back
        self.num_published = 0  # full pages, from the first, that others can find
        streaming = request.generation.streaming
        # Decides which pages stay, so that the next turn of a session can go back a little.
        self.streaming = streaming and streaming.with_margin() if request.session else streaming
        # First tokens whose pages are those of any sequence that starts with them.
        self.shared_len = streaming.shared_len() if streaming else self.full_len
        self.num_swapped = 0  # pages of it that lie on the host
        self.num_unread = 0  # tokens sampled by steps that were not read yet
        self.row = -1  # its row in the RowTable while it runs
        self.state: SequenceState = "waiting"

    @property
    def num_output(self) -> int:
        """Output tokens that were read."""
        return len(self.token_ids) - self.prompt_len

    @property
    def total_len(self) -> int:
        """Prompt plus output tokens so far, those not read yet included."""
        return len(self.token_ids) + self.num_unread

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are not in the cache yet; 1 for a decode."""
        return len(self.token_ids) + self.num_unread - self.computed_len

    @property
    def shared_tokens(self) -> list[int]:
        """Those of the `shared_len` first tokens that were read."""
        tokens = self.token_ids
        return tokens if self.shared_len >= len(tokens) else tokens[: self.shared_len]

    @property
    def max_cached_len(self) -> int:
        """Most tokens it will ever compute: the last sampled token is never fed back."""
        return self.full_len - 1

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether prompt tokens are still to be scored."""
        return len(self.prompt_scores) < self.num_to_score

    def finish_reason(self) -> FinishReason | None:
        """Whether the newest token ends the answer."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        if len(self.token_ids) >= self.full_len:
            return "length"
        return None

"""The mailboxes of all requests of which the engine may still speak, by request id.

Checks who may have one, and puts into them what the engine says. Lives on the event loop; belongs
to one `AsyncEngine`.
"""

from swiftjax.engine.link_messages import News
from swiftjax.engine.mailbox import Mailbox
from swiftjax.engine.request import Request
from swiftjax.engine.served_tokens import owner_of
from swiftjax.errors import InvalidRequestError, KeyLimitError, QueueFullError, SwiftJaxError

# Prompt tokens of all requests at a time; each takes 40 bytes here and as many in the engine.
MAX_PROMPT_TOKENS = 2**25
# Prompts up to this length are too few by their number, which the queue limits.
SHORT_PROMPT = 2**12


class Mailboxes(dict[str, Mailbox]):
    """Each is in here exactly as long as the engine may still speak of its request."""

    def check_new(self, request: Request) -> None:
        """Raise InvalidRequestError for an id in use, QueueFullError where there is no room.

        That is a KeyLimitError where there is no more for whoever asks.
        """
        if request.request_id in self:
            raise InvalidRequestError(
                f"request_id {request.request_id!r:.80} is in use; choose another or leave it out"
            )
        if len(request.prompt_token_ids) > SHORT_PROMPT:
            self._check_room(len(request.prompt_token_ids), owner_of(request.options.client_id))

    def _check_room(self, num_tokens: int, owner: str) -> None:
        total = own = num_tokens
        for mailbox in self.values():
            total += mailbox.num_prompt_tokens
            own += mailbox.num_prompt_tokens if mailbox.owner == owner else 0
        if owner and own > MAX_PROMPT_TOKENS // 2:
            raise KeyLimitError(
                f"the prompts of this API key, or client, would have {own} tokens; "
                f"{MAX_PROMPT_TOKENS // 2} are taken at a time: try again when some have ended"
            )
        if total > MAX_PROMPT_TOKENS:
            raise QueueFullError(
                f"the prompts of all requests would have {total} tokens; {MAX_PROMPT_TOKENS} are "
                "taken at a time: try again when some have ended"
            )

    def deliver(self, news: News) -> None:
        """Put everything where it belongs."""
        # A mailbox is absent only when its request was made on an event loop that is closed by now.
        for refused in news.refused:
            if mailbox := self.pop(refused.request_id, None):
                mailbox.fail(refused.problem.error())
        for output in news.outputs:
            if mailbox := self.get(output.request_id):
                mailbox.put(output)
                if mailbox.engine_is_done:
                    del self[output.request_id]

    def fail(self, error: SwiftJaxError) -> None:
        """Let every reader raise this; nothing else will come."""
        for mailbox in self.values():
            mailbox.fail(error)
        self.clear()

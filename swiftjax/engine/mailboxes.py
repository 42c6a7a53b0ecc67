"""The mailboxes of all requests of which the engine may still speak, by request id.

Checks who may have one, and puts into them what the engine says. Lives on the event loop; belongs
to one `AsyncEngine`.
"""

from swiftjax.engine.link_messages import News
from swiftjax.engine.mailbox import Mailbox
from swiftjax.engine.request import Request
from swiftjax.errors import InvalidRequestError, QueueFullError, SwiftJaxError

# Prompt tokens of all requests at a time; each takes 40 bytes here and as many in the engine.
MAX_PROMPT_TOKENS = 2**25
# Prompts up to this length are too few by their number, which the queue limits.
SHORT_PROMPT = 2**12


class Mailboxes(dict[str, Mailbox]):
    """Each is in here exactly as long as the engine may still speak of its request."""

    def check_new(self, request: Request) -> None:
        """Raise InvalidRequestError for an id in use, QueueFullError where there is no room."""
        if request.request_id in self:
            raise InvalidRequestError(
                f"request_id {request.request_id!r:.80} is in use; choose another or leave it out"
            )
        num_tokens = len(request.prompt_token_ids)
        if num_tokens <= SHORT_PROMPT:
            return
        total = num_tokens + sum(mailbox.num_prompt_tokens for mailbox in self.values())
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

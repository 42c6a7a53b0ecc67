"""The pages of sequences: fresh, found by their prefix, shared with a fork, or moved to the host.

Changes what a sequence owns and how far it is computed, never its state: whether and when is for
the scheduler to decide, which alone calls this.
"""

from collections.abc import Callable

from swiftjax.batch import PageCopy, PageMove
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.plan import PlanDraft
from swiftjax.engine.prefix_cache import PageKeys
from swiftjax.engine.request import Request
from swiftjax.engine.sequence import Sequence


class SequencePages:
    """What sequences own of one pool, and of the host."""

    def __init__(
        self, pool: PagePool, keys: PageKeys, salt: Callable[[Request], str], *, uses_cache: bool
    ) -> None:
        self.num_on_host = 0  # pages
        self._pool = pool
        self._keys = keys
        self._salt = salt
        self._uses_cache = uses_cache
        self._dropped: list[str] = []  # host copies nobody will ask for again

    def start(self, sequence: Sequence) -> bool:
        """Take the pages that are cached, if the others that its tokens need are free too."""
        size, total = self._pool.page_size, len(sequence.token_ids)
        cached: list[int] = []
        if self._may_reuse(sequence):
            self._extend_keys(sequence)
            # The last token is always computed: its logits are what the next one is drawn from.
            cached = self._pool.take_published(sequence.page_keys[: (total - 1) // size])
        if self._needed(sequence) - len(cached) > self._pool.num_free:
            self._pool.release(cached)
            return False
        sequence.page_ids = cached
        sequence.num_published = len(cached)
        sequence.computed_len = len(cached) * size
        if sequence.num_cached is None:
            sequence.num_cached = sequence.computed_len
        return True

    def publish(self, sequence: Sequence) -> None:
        """Let others find the pages that are full now; they are written before anyone reads."""
        if sequence.num_dropped:
            return  # what a page of it holds no longer follows from a prefix, or is where it was
        num_known = min(sequence.computed_len, len(sequence.token_ids), sequence.shared_len)
        first, num_full = sequence.num_published, num_known // self._pool.page_size
        if num_full == first:
            return
        sequence.num_published = num_full
        if self._may_reuse(sequence):
            self._extend_keys(sequence)
            for i in range(first, num_full):
                self._pool.publish(sequence.page_ids[i], sequence.page_keys[i])

    def fork(self, draft: PlanDraft, source: Sequence, fork: Sequence) -> bool:
        """Share the prompt's pages but the last, which is copied before it is written to."""
        own = self._pool.allocate(1)
        if own is None:
            return False
        known = fork.prompt_len - 1
        num_shared = known // self._pool.page_size
        shared = source.page_ids[:num_shared]
        self._pool.share(shared)
        if known % self._pool.page_size:
            draft.copies.append(PageCopy(source.page_ids[num_shared], own[0]))
        fork.page_ids = shared + own
        fork.page_keys = source.page_keys[:num_shared]
        fork.computed_len = fork.num_cached = known
        return True

    def leave_prompt(self, sequence: Sequence, heir: Sequence) -> None:
        """Hand the prompt's pages on to a choice that nobody else is left to fork to."""
        size, known = self._pool.page_size, heir.prompt_len - 1
        num_full = known // size
        if sequence.computed_len >= (num_full + 1) * size:
            known = num_full * size  # the last page is full: others may read it, so it stays as is
        heir.computed_len = heir.num_cached = known = min(known, sequence.computed_len)
        count = self._pool.pages_for(known)
        heir.page_ids, sequence.page_ids = sequence.page_ids[:count], sequence.page_ids[count:]
        heir.page_keys = sequence.page_keys[: known // size]

    def swap_out(self, draft: PlanDraft, sequence: Sequence) -> None:
        """Copy the pages to the host; they are still to be released."""
        draft.out.append(PageMove(sequence.request.request_id, tuple(sequence.page_ids)))
        sequence.num_swapped = len(sequence.page_ids)
        self.num_on_host += sequence.num_swapped

    def swap_in(self, draft: PlanDraft, sequence: Sequence) -> bool:
        """Take pages for the host's copy, if there are more for what is computed next."""
        # A plan without work would lose the move.
        if self._needed(sequence) > self._pool.num_free:
            return False
        pages = self._pool.allocate(sequence.num_swapped)
        assert pages is not None
        draft.back.append(PageMove(sequence.request.request_id, tuple(pages)))
        self.num_on_host -= sequence.num_swapped
        sequence.num_swapped = sequence.num_published = 0
        sequence.page_ids = pages
        return True

    def drop_copy(self, sequence: Sequence) -> None:
        """The host's copy is of no use any more."""
        self.num_on_host -= sequence.num_swapped
        self._dropped.append(sequence.request.request_id)

    def take_dropped(self) -> list[str]:
        """Whose copies the next step is to drop."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def release(self, sequence: Sequence) -> None:
        """Give all pages up."""
        self._pool.release(sequence.page_ids)
        sequence.page_ids = []

    def _needed(self, sequence: Sequence) -> int:
        """Pages that must be there before it runs."""
        num_pages = self._pool.pages_for(sequence.total_len) - sequence.num_dropped
        return min(num_pages, sequence.max_pages)

    def _extend_keys(self, sequence: Sequence) -> None:
        tokens = sequence.shared_tokens
        self._keys.extend(sequence.page_keys, tokens, self._salt(sequence.request))

    def _may_reuse(self, sequence: Sequence) -> bool:
        # Cached tokens are not computed, so they could not be scored.
        return self._uses_cache and not sequence.wants_prompt_scores

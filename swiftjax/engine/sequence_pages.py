"""Where pages of sequences come from: free, found by prefix, kept by a session, shared, swapped.

Changes what a sequence owns and how far it is computed, never its state: whether and when is for
the scheduler and its parts to decide, which alone call this.
"""

from collections.abc import Callable

from swiftjax.batch import PageCopy, PageMove
from swiftjax.engine.kept_pages import Kept, KeptPages
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.plan import PlanDraft
from swiftjax.engine.prefix_cache import PageKeys
from swiftjax.engine.request import Request
from swiftjax.engine.sequence import Sequence


class SequencePages:
    """What sequences own of one pool, and of the host."""

    def __init__(
        self,
        pool: PagePool,
        keys: PageKeys,
        kept: KeptPages,
        salt: Callable[[Request], str],
        *,
        uses_cache: bool,
    ) -> None:
        self.num_on_host = 0  # pages
        self.kept = kept
        self._pool = pool
        self._keys = keys
        self._salt = salt
        self._uses_cache = uses_cache
        self._dropped: list[str] = []  # host copies nobody will ask for again
        self._copied: list[int] = []  # pages that stay owned until they were copied

    def owned_pages(self) -> list[int]:
        """Pages that are owned by no sequence, once per owner."""
        return [*self.kept.owned_pages(), *self._copied]

    def start(self, draft: PlanDraft, sequence: Sequence) -> bool:
        """Take the pages kept or cached for it, if the others that its tokens need are free too."""
        session = sequence.request.session
        if (kept := self.kept.get(session)) is not None:
            if known := self._usable_len(sequence, kept):
                return self._start_from(draft, sequence, kept, known)
            self.kept.drop(session)
        return self._start_from_cache(sequence)

    def _start_from_cache(self, sequence: Sequence) -> bool:
        size, total = self._pool.page_size, len(sequence.token_ids)
        cached: list[int] = []
        if self._may_reuse(sequence):
            self._extend_keys(sequence)
            # The last token is always computed: its logits are what the next one is drawn from.
            cached = self._pool.take_published(sequence.page_keys[: (total - 1) // size])
        if not self.kept.make_room(self._needed(sequence) - len(cached)):
            self._pool.release(cached)
            return False
        sequence.page_ids = cached
        sequence.num_published = len(cached)
        self._begin(sequence, len(cached) * size)
        return True

    def _usable_len(self, sequence: Sequence, kept: Kept) -> int:
        request = sequence.request
        is_same = kept.streaming == request.generation.streaming
        is_same &= kept.salt == self._salt(request) and not sequence.wants_prompt_scores
        known = kept.usable_len(sequence.token_ids, self._pool.page_size) if is_same else 0
        num_own = self._pool.pages_for(known) - kept.num_dropped
        # More pages than it may own can come from a file only.
        return known if num_own <= sequence.max_pages else 0

    def _start_from(self, draft: PlanDraft, sequence: Sequence, kept: Kept, known: int) -> bool:
        """Take over the first `known` tokens of what its session kept."""
        pool, session = self._pool, sequence.request.session
        sequence.num_dropped = kept.num_dropped
        num_own = pool.pages_for(known) - kept.num_dropped
        is_partial = known % pool.page_size > 0
        shared = is_partial and not kept.copy and not pool.is_private(kept.page_ids[num_own - 1])
        fresh = max(self._needed(sequence), kept.num_pages)
        if kept.copy is None:
            fresh = self._needed(sequence) - num_own + shared
        if not self.kept.make_room(fresh, spare=session):
            sequence.num_dropped = 0
            return False
        if kept.copy is not None and not self.kept.fetch(kept.copy.key):
            sequence.num_dropped = 0
            self.kept.drop(session)
            return self._start_from_cache(sequence)
        self.kept.take(session)
        pages = list(kept.page_ids)
        if kept.copy is not None:
            pages = pool.allocate(kept.num_pages) or []
            draft.back.append(PageMove(kept.copy.key, tuple(pages)))
            self.kept.release_copy(kept.copy)
        pool.release(pages[num_own:])
        sequence.page_ids = pages[:num_own]
        if shared:
            self._copy_last(draft, sequence)
        sequence.num_published = 0
        self._begin(sequence, known)
        return True

    def _copy_last(self, draft: PlanDraft, sequence: Sequence) -> None:
        """Write to a page of its own instead of the last one, which others read."""
        [own] = self._pool.allocate(1) or []
        last, sequence.page_ids[-1] = sequence.page_ids[-1], own
        draft.copies.append(PageCopy(last, own))
        self._copied.append(last)

    def _begin(self, sequence: Sequence, known: int) -> None:
        sequence.computed_len = known
        if sequence.num_cached is None:
            sequence.num_cached = known

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
        own = self.allocate(1)
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
        if not self.kept.make_room(self._needed(sequence)):
            return False
        if not self.kept.fetch(sequence.request.request_id):
            self.drop_copy(sequence)
            sequence.num_swapped = sequence.computed_len = sequence.num_dropped = 0
            return self.start(draft, sequence)
        pages = self._pool.allocate(sequence.num_swapped)
        assert pages is not None
        draft.back.append(PageMove(sequence.request.request_id, tuple(pages)))
        self.drop_copy(sequence)
        sequence.num_swapped = sequence.num_published = 0
        sequence.page_ids = pages
        return True

    def drop_copy(self, sequence: Sequence) -> None:
        """The host's copy is of no use any more."""
        self.num_on_host -= sequence.num_swapped
        self._dropped.append(sequence.request.request_id)

    def take_moves(self) -> tuple[list[PageMove], list[str]]:
        """Pages that leave for copies of sessions, and copies to drop once all else has moved."""
        out, unused = self.kept.take_moves()
        dropped, self._dropped = [*self._dropped, *unused], []
        self._pool.release(self._copied)  # to be written to by nothing before this plan's copies
        self._copied = []
        return out, dropped

    def has_room(self, num_tokens: int, num_seqs: int) -> bool:
        """Whether free pages hold so many tokens more of so many sequences, however spread."""
        return self._pool.num_free >= self._pool.pages_for(num_tokens) + num_seqs

    def allocate(self, count: int) -> list[int] | None:
        """Take free pages, those of idle sessions if need be; None if there are too few."""
        return self._pool.allocate(count) if self.kept.make_room(count) else None

    def release(self, sequence: Sequence) -> None:
        """Give all pages up: to its session, unless they were copied out, or to anybody."""
        session = sequence.request.session
        if session and sequence.state != "swapped":
            self._keep(session, sequence)
        else:
            self._pool.release(sequence.page_ids)
        sequence.page_ids = []

    def _keep(self, session: str, sequence: Sequence) -> None:
        known = min(sequence.computed_len, len(sequence.token_ids))
        count = self._pool.pages_for(known) - sequence.num_dropped
        self._pool.release(sequence.page_ids[count:])
        if not known:
            return
        kept = Kept(
            sequence.token_ids,
            known,
            sequence.num_dropped,
            sequence.request.generation.streaming,
            self._salt(sequence.request),
            tuple(sequence.page_ids[:count]),
        )
        self.kept.put(session, kept)

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

"""How many pages a sequence may own, and which leave a streaming one. Called by the scheduler.

An ordinary sequence keeps all its pages until it ends or is preempted.
"""

from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.rows import RowTable
from swiftjax.engine.sequence import Sequence
from swiftjax.engine.streaming import SESSION_MARGIN, Streaming
from swiftjax.errors import InvalidRequestError


def limit_pages(sequence: Sequence, pool: PagePool, rows: RowTable) -> int:
    """Most pages that a sequence will own at a time.

    Raises InvalidRequestError for a request, or sinks and a window, that the cache can never hold.
    """
    size, all_pages = pool.page_size, pool.pages_for(sequence.max_cached_len)
    streaming = sequence.streaming
    if streaming is None:
        if all_pages > pool.num_pages:
            raise _too_long(sequence, pool.num_pages * size)
        return all_pages
    most = min(pool.num_pages, rows.page_table.shape[1])
    check_fits(streaming, size, most, in_session=bool(sequence.request.session))
    return min(all_pages, most, streaming.most_pages(size))


def check_fits(
    streaming: Streaming, page_size: int, max_pages: int, *, in_session: bool = False
) -> None:
    """Raise InvalidRequestError for sinks and a window that so many pages can't hold."""
    least, most = streaming.least_pages(page_size) * page_size, max_pages * page_size
    if least > most:
        margin = f" (of which {SESSION_MARGIN} for the session)" if in_session else ""
        raise InvalidRequestError(
            f"sink {streaming.sink} and window {streaming.window}{margin} take {least} tokens in "
            f"pages of {page_size}; a request has at most {most}: lower the window by "
            f"{least - most}, or raise max_model_len and max_total_token_num as far as the model "
            "goes"
        )


def _too_long(sequence: Sequence, capacity: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"prompt ({sequence.prompt_len}) + max_new_tokens ({sequence.request.max_new_tokens}) "
        f"needs {sequence.max_cached_len} KV slots; the cache has {capacity} in all. At most "
        f"{capacity + 1 - sequence.prompt_len} new tokens fit; raise max_total_token_num"
    )


def drop_expired(sequence: Sequence, streaming: Streaming, pool: PagePool, rows: RowTable) -> None:
    """Give back the pages that hold neither a sink nor a token of any window to come.

    A step that was dispatched may still read them: the device runs steps in order.
    """
    expired = streaming.expired_pages(sequence.computed_len, pool.page_size)
    first, count = streaming.sink_pages(pool.page_size), expired - sequence.num_dropped
    if count > 0:
        pool.release(sequence.page_ids[first : first + count])
        del sequence.page_ids[first : first + count]
        sequence.num_dropped = expired
        rows.set_pages(sequence, first)

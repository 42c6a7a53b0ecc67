"""What happens to an exception nobody meant: an id for the client, everything else to the log.

Both transports call it, so a bug reads the same on either.
"""

import logging
import uuid

logger = logging.getLogger(__name__)


def report_bug(where: str, error: BaseException) -> str:
    """Log an exception under a fresh id; gives the text that a client may see."""
    error_id = uuid.uuid4().hex[:16]
    logger.error("error %s in %s", error_id, where, exc_info=error)
    return f"internal error {error_id}; the server's log has the details"

"""One log line per call: what was called, how it ended, how long it took, under which id.

Never what was asked or answered: no bodies, no headers, no query strings. Used by both transports.
"""

import logging
import re
import uuid

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
MAX_CHARS = 128


def request_id_from(given: str) -> str:
    """Take a client's id if it can be logged and sent back as it is, else make one."""
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def log_call(*, protocol: str, call: str, status: str, request_id: str, seconds: float) -> None:
    """Write the line; `extra` has the same as fields, for formatters that want them."""
    # What strangers sent is cut and quoted, so that no call can forge a line.
    call, request_id = repr(call[:MAX_CHARS])[1:-1], repr(request_id[:MAX_CHARS])[1:-1]
    fields = {
        "protocol": protocol,
        "call": call,
        "status": status,
        "request_id": request_id,
        "seconds": round(seconds, 6),
    }
    logger.info(
        "%s %s %s in %.3f s, id %s",
        protocol,
        call,
        status,
        seconds,
        request_id,
        extra={"fields": fields},
    )

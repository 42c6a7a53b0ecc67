"""Log records as lines of JSON, for machines that collect them: `serve --log-format json`."""

import json
import logging
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """One object per record; a record's own fields stand beside the usual ones."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record on one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def write_json_lines() -> None:
    """Let every handler that logs to a stream write JSON from now on."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())

"""The formats of a service's log: lines for people, or a JSON object per line for log collectors."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone

FORMATS = ("text", "json")


def formatter(name: str) -> logging.Formatter:
    """The formatter with this name, one of `FORMATS`."""
    return (
        _JsonFormatter()
        if name == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    )


class _JsonFormatter(logging.Formatter):
    """One JSON object per line: `timestamp` (RFC 3339, UTC), `level`, `logger`, `message`, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            "timestamp": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)

"""What a replica logs: lines of JSON on standard error, one for each request that was answered.

Serve configures its own logger alone, and Python writes nothing below a warning by itself.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import UTC, datetime
from typing import Any, TextIO

from kintsugi.core.errors import InvalidField
from kintsugi.store.protocol.status import DETAIL_CHARS_MAX

LEVEL_ENVIRONMENT = "KINTSUGI_LOG_LEVEL"
LEVEL_DEFAULT = "INFO"


class RequestLine(dict[str, Any]):
    """One request: who asked what, and how it ended. Never what was asked or answered.

    A log's message: its text is JSON, and in a line of JSON its fields stand beside the line's own.
    """

    @staticmethod
    def of(
        request_id: str,
        method: str,
        namespace: str,
        status: str | int,
        began_s: float,
        error: Exception | None = None,
    ) -> RequestLine:
        """``began_s`` as `time.perf_counter` said it."""
        ms = round((time.perf_counter() - began_s) * 1e3, 3)
        line = RequestLine(request_id=request_id, method=method)
        line |= {"namespace": namespace[:DETAIL_CHARS_MAX], "status": status, "ms": ms}
        if error is not None:
            line["error"] = f"{type(error).__name__}: {error}"[:DETAIL_CHARS_MAX]
        return line

    def __str__(self) -> str:
        return json.dumps(self)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time_utc = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time_utc, "level": record.levelname, "logger": record.name}
        line |= record.msg if isinstance(record.msg, RequestLine) else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, to know it again."""


def write_json_lines(stream: TextIO | None = None) -> None:
    """Have what this process logs of Kintsugi written, from the environment's `KINTSUGI_LOG_LEVEL` up: a
    level's name, `INFO` where it is not set. Idempotent.

    ``stream`` None: the process's own standard error, which Serve may have put its own log in place of.
    Raises `InvalidField` for a level that there is not.
    """
    level = os.environ.get(LEVEL_ENVIRONMENT, "").upper() or LEVEL_DEFAULT
    names = logging.getLevelNamesMapping()
    if level not in names:
        raise InvalidField(LEVEL_ENVIRONMENT, f"{level!r} is none of {', '.join(names)}")
    logger = logging.getLogger("kintsugi")
    logger.setLevel(level)
    if any(isinstance(handler, _Handler) for handler in logger.handlers):
        return
    handler = _Handler(stream or sys.__stderr__ or sys.stderr)
    handler.setFormatter(_JsonLines())
    logger.addHandler(handler)
    # What else listens, listens at the root: every line would come twice.
    logger.propagate = False

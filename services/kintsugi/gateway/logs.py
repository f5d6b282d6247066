"""Writes the log as lines of JSON to standard error, with one line for each answered request.

Serve configures only its own logger, and Python's default level is `WARNING`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from kintsugi.core.errors import InvalidField

LEVEL_ENVIRONMENT = "KINTSUGI_LOG_LEVEL"
LEVEL_DEFAULT = "INFO"


class RequestLine(dict[str, Any]):
    """The message of a log record about one request: its method, namespace and status, never its contents.

    As text it is JSON; in a line of JSON, its fields become fields of the line.
    """

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
    """Our handler, recognised by its type."""


def write_json_lines(stream: TextIO | None = None) -> None:
    """Write this process's log of Kintsugi as JSON, from the level in the environment variable
    `KINTSUGI_LOG_LEVEL` (default `INFO`) upwards. Idempotent.

    ``stream`` None: the process's original standard error, which Serve may have replaced by its own log.
    Raises `InvalidField` for an unknown level.
    """
    level = os.environ.get(LEVEL_ENVIRONMENT, "").upper() or LEVEL_DEFAULT
    names = logging.getLevelNamesMapping()
    if level not in names:
        raise InvalidField(LEVEL_ENVIRONMENT, f"{level!r} must be one of {', '.join(names)}")
    logger = logging.getLogger("kintsugi")
    logger.setLevel(level)
    if any(isinstance(handler, _Handler) for handler in logger.handlers):
        return
    handler = _Handler(stream or sys.__stderr__ or sys.stderr)
    handler.setFormatter(_JsonLines())
    logger.addHandler(handler)
    # Handlers of the root logger would write every line a second time.
    logger.propagate = False

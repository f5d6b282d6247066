"""The process that parses files: `python -m kintsugi.precompute.sources.parser_process LIMITS`.

It sets its own resource limits first. Then it reads requests, one JSON object per line, and answers with
messages: a length (4 bytes, big-endian) and JSON. A document that takes too much CPU time ends the process
with a signal. A document that takes too much memory ends it with an error or `MEMORY_EXIT`. `sandbox` then
starts another process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from kintsugi.core.schema import STRICT, load
from kintsugi.precompute.sources.files import FileRange, Format
from kintsugi.precompute.sources.readers import Columns, Document, Failure, read

MEMORY_EXIT = 70
LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class ParserLimits:
    """Resource limits of a parser."""

    __pydantic_config__ = STRICT

    memory_bytes_max: int = 1 << 30
    """Address space, in addition to what the process has when it starts."""
    cpu_s_max: float = 60.0
    """CPU seconds for one document, or for one batch of Parquet rows."""
    wait_s_max: float = 300.0
    """Maximum seconds between two documents, which include the time of a slow server."""


def main() -> None:
    limits = load(ParserLimits, json.loads(sys.argv[1]), "limits")
    _limit_memory(limits.memory_bytes_max)
    # Output that libraries print must not mix with the messages.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        for line in sys.stdin.buffer:
            try:
                _answer(json.loads(line), limits, answers)
            except MemoryError:
                os._exit(MEMORY_EXIT)
            except BrokenPipeError:
                os._exit(0)  # the reader has closed the pipe


def _limit_memory(size: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(request: Any, limits: ParserLimits, answers: BinaryIO) -> None:
    piece = FileRange(**{**request["piece"], "format": Format(request["piece"]["format"])})
    columns = Columns(**request["columns"])
    for item in _within_cpu_time(_read_anything(piece, columns), limits.cpu_s_max):
        values = asdict(item)
        del values["url"]
        _send(answers, {"document" if isinstance(item, Document) else "failure": values})
    _send(answers, {"end": True})


def _read_anything(piece: FileRange, columns: Columns) -> Iterator[Document | Failure]:
    """Read the piece. A hostile file can make a parser raise any error; only this file then fails."""
    try:
        yield from read(piece, columns)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001
        yield Failure(piece.url, piece.start, f"the file cannot be read: {type(error).__name__}: {error}")


def _within_cpu_time(items: Iterator[Document | Failure], seconds_max: float) -> Iterator[Document | Failure]:
    """Yield the items. If one takes more CPU time, SIGPROF ends the process; a signal handler of Python would
    have to wait for the parser."""
    while True:
        signal.setitimer(signal.ITIMER_PROF, seconds_max)
        item = next(items, None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if item is None:
            return
        yield item


def _send(answers: BinaryIO, message: dict[str, Any]) -> None:
    data = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    answers.write(LENGTH.pack(len(data)) + data)
    answers.flush()


if __name__ == "__main__":
    main()

"""The process in which files are parsed: `python -m kintsugi.precompute.sources.parser_process LIMITS`.

It limits itself before it reads anything, then answers requests, one JSON object per line, with messages: a
length (4 bytes, big-endian) and JSON. A document that takes too much CPU time ends the process by a
signal, one that takes too much memory by an error or `MEMORY_EXIT`; `sandbox` starts another.
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
    """What parsing may cost."""

    __pydantic_config__ = STRICT

    memory_bytes_max: int = 1 << 30
    """Address space beyond that of the process when it starts."""
    cpu_s_max: float = 60.0
    """CPU seconds for one document, or for one batch of Parquet rows."""
    wait_s_max: float = 300.0
    """Seconds without a document, which a slow server takes, too."""


def main() -> None:
    limits = load(ParserLimits, json.loads(sys.argv[1]), "limits")
    _limit_memory(limits.memory_bytes_max)
    # What libraries print must not end up among the messages.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        for line in sys.stdin.buffer:
            try:
                _answer(json.loads(line), limits, answers)
            except MemoryError:
                os._exit(MEMORY_EXIT)
            except BrokenPipeError:
                os._exit(0)  # nobody reads any more


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
    """Read the piece. Parsers raise whatever a hostile file makes them raise: that costs the file alone."""
    try:
        yield from read(piece, columns)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001
        yield Failure(piece.url, piece.start, f"the file cannot be read: {type(error).__name__}: {error}")


def _within_cpu_time(items: Iterator[Document | Failure], seconds_max: float) -> Iterator[Document | Failure]:
    """Let SIGPROF end the process if one item takes too long. The kernel does it: a signal
    handler of Python would wait for the parser."""
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

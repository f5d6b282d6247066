"""Reads files in a separate process with limits on memory and time, because files may be hostile.

One parser process reads one file after another. If a file ends it, another process is started. A hostile file
may have taken over the parser, so its answers are checked like the file itself.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import asdict, replace

from kintsugi.core.errors import KintsugiError
from kintsugi.core.schema import load
from kintsugi.precompute.sources.files import FileRange
from kintsugi.precompute.sources.parser_process import LENGTH, MEMORY_EXIT, ParserLimits
from kintsugi.precompute.sources.readers import (
    DOCUMENT_BYTES_MAX,
    Columns,
    Document,
    Failure,
    check_document,
)

MESSAGE_BYTES_MAX = 8 * DOCUMENT_BYTES_MAX
"""JSON needs at most six bytes for a character."""
REASON_CHARS_MAX = 2_000
PLACE_MAX = (1 << 63) - 1
"""Largest integer that the ledger can store."""
IDLE_MAX = 1
"""Maximum number of idle parsers."""
_PIECE_BYTES = 1 << 20
_MODULE = "kintsugi.precompute.sources.parser_process"

_idle: list[_Parser] = []


def read_confined(
    piece: FileRange,
    columns: Columns,
    limits: ParserLimits | None = None,
) -> Generator[Document | Failure]:
    """Yield the piece's documents in order, like `readers.read`. If a file exceeds the limits, its last item
    is a `Failure`."""
    given = limits or ParserLimits()
    parser = _take_parser(given)
    is_reusable = False
    try:
        parser.ask(piece, columns)
        while (item := parse_answer(parser.receive(), piece)) is not None:
            yield item
        is_reusable = True
    except _ParserEnded as ended:
        yield Failure(piece.url, piece.start, f"the file cannot be read: {ended}")
    finally:
        if is_reusable and len(_idle) < IDLE_MAX:
            _idle.append(parser)
        else:
            parser.close()


def parse_answer(data: bytes, piece: FileRange) -> Document | Failure | None:
    """Parse a message of the parser: a document or failure of the piece; None at the end of the piece.

    Raises `_ParserEnded` for a message that a correct parser does not send."""
    try:
        message = json.loads(data)
        if message == {"end": True}:
            return None
        ((kind, values),) = message.items()
        if kind == "failure":
            failure = load(Failure, {**values, "url": piece.url})
            _check_place(failure.place)
            return replace(
                failure, reason=_shorten(failure.reason), document_id=_shorten(failure.document_id)
            )
        document = load(Document, {**values, "url": piece.url})
        _check_place(document.place)
        if kind != "document":
            raise ValueError("it is not a document")
    except (ValueError, TypeError, AttributeError, RecursionError, KintsugiError) as error:
        raise _ParserEnded(f"its parser sent an invalid answer ({_shorten(str(error))})") from None
    return check_document(document)


def _check_place(place: int) -> None:
    if not 0 <= place <= PLACE_MAX:
        raise ValueError(f"place {place} is out of range")


def _shorten(text: str) -> str:
    return text[:REASON_CHARS_MAX].encode(errors="replace").decode()


class _ParserEnded(Exception):
    """The parser died or was killed. The message says why."""


class _Parser:
    """One parser process."""

    def __init__(self, limits: ParserLimits) -> None:
        self.limits = limits
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # Arrow's other allocators reserve address space, which the limit would count.
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "MALLOC_ARENA_MAX": "2",
            "OMP_NUM_THREADS": "1",
        }
        # -P: modules in the working folder must not replace the standard library's.
        command = [sys.executable, "-P", "-m", _MODULE, json.dumps(asdict(limits))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C must reach only the job, which ends the parser
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, piece: FileRange, columns: Columns) -> None:
        """Send a request. Raises `_ParserEnded`."""
        request = {"piece": asdict(piece), "columns": asdict(columns)}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._why_ended() from None

    def receive(self) -> bytes:
        """Return the next message. Raises `_ParserEnded`."""
        until_s = time.monotonic() + self.limits.wait_s_max
        (size,) = LENGTH.unpack(self._receive_exactly(LENGTH.size, until_s))
        if size > MESSAGE_BYTES_MAX:
            raise _ParserEnded(f"its parser sent an answer of {size} bytes")
        return self._receive_exactly(size, until_s)

    def _receive_exactly(self, size: int, until_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe, data = self._process.stdout.fileno(), bytearray()
        ready = select.poll()  # select.select refuses descriptors above 1023
        ready.register(pipe, select.POLLIN)
        while len(data) < size:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not ready.poll(left_s * 1000):
                raise _ParserEnded(f"no document was read for {self.limits.wait_s_max:g} seconds")
            part = os.read(pipe, min(size - len(data), _PIECE_BYTES))
            if not part:
                raise self._why_ended()
            data += part
        return bytes(data)

    def _why_ended(self) -> _ParserEnded:
        self.close()
        limits, status = self.limits, self._process.returncode
        if status == -signal.SIGPROF:
            return _ParserEnded(f"a document takes more than {limits.cpu_s_max:g} CPU seconds; split it")
        memory = f"{limits.memory_bytes_max >> 20} MiB"
        if status == MEMORY_EXIT:
            return _ParserEnded(f"parsing it takes more than {memory} of memory; split it")
        return _ParserEnded(
            f"its parser ended with status {status}, most likely because {memory} of memory were not "
            "enough; split it"
        )

    def close(self) -> None:
        """End the process. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            # Wait briefly for a process that is ending: its exit status is the reason.
            self._process.wait(1.0 if self._process.poll() is None else None)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _take_parser(limits: ParserLimits) -> _Parser:
    """Return an idle parser, or start a new one."""
    while _idle:
        parser = _idle.pop()
        if parser.limits == limits and parser.is_alive:
            return parser
        parser.close()
    return _Parser(limits)


@atexit.register
def close_idle_parsers() -> None:
    while _idle:
        _idle.pop().close()

"""An audit log with one line of JSON per request: the caller, the request and the result.

Lines are appended and never changed. A line is written to the operating system before the request ends: it
survives a crash of the process, but not a power failure. A full file is renamed to `NAME.1`, the previous
`NAME.1` to `NAME.2`, and so on; at most `FILES_MAX` files are kept. Copy the files elsewhere to keep them
longer."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kintsugi.core.errors import InvalidField
from kintsugi.store.protocol.access import Verb
from kintsugi.store.protocol.files import lock_folder

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 64 << 20
FILES_MAX = 16
"""Maximum number of files of one log, including the current one."""
STRANGERS_PERIOD_S = 1.0
"""Callers without a valid token share one line per period, which counts their requests: they must not be able
to push other lines out of the log."""
FILE_MODE = 0o600


@dataclass
class AuditEntry:
    """What is known about one request."""

    method: str
    """Name of the RPC, or the HTTP path."""
    result: str
    """`OK` or the name of the gRPC status; over HTTP, the status code."""
    caller: str = ""
    """The caller's name in the tokens file; empty for one without a valid token or certificate."""
    verb: Verb | None = None
    """The verb that the request requires; None: any."""
    namespace: str = ""
    keys: Sequence[str] = ()
    """Keys of the chunks in the request, hexadecimal."""
    request_id: str = ""
    error: str = ""


class AuditLog:
    """One log file. Thread-safe; several processes may share it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        file_bytes_max: int = FILE_BYTES_MAX,
        files_max: int = FILES_MAX,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open `NAME.jsonl` in `folder`, which is created if it is missing. Raises `InvalidField` if the file
        cannot be written."""
        self.path = folder / f"{name}.jsonl"
        self._file_bytes_max = file_bytes_max
        self._files_max = files_max
        self._clock = clock
        self._lock = threading.Lock()
        self._strangers = 0
        self._stranger_s = float("-inf")
        self._is_torn = False
        """Whether the last line is incomplete."""
        self.lines_lost = 0
        """Lines that could not be written."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = self._open()
        except OSError as error:
            raise InvalidField("audit_dir", f"{self.path} cannot be written ({error.strerror})") from error

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    def write(self, entry: AuditEntry) -> None:
        """Append a line. A failure is logged and counted, and the request continues."""
        with self._lock:
            others = 0
            if not entry.caller:
                now_s = self._clock()
                if now_s - self._stranger_s < STRANGERS_PERIOD_S:
                    self._strangers += 1
                    return
                self._stranger_s, others, self._strangers = now_s, self._strangers, 0
            try:
                self._append(self._format(entry, others))
            except OSError as error:
                self.lines_lost += 1
                log.error("a line of the audit log %s was lost (%s); free some disk space", self.path, error)

    def _format(self, entry: AuditEntry, others: int) -> bytes:
        """Return one line. `others` is the number of requests without a valid token since the last such
        line."""
        time_utc = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time_utc,
            "caller": entry.caller,
            "verb": entry.verb,
            "method": entry.method,
            "namespace": entry.namespace,
            "keys": [*entry.keys],
            "result": entry.result,
        }
        more: dict[str, object] = {"request_id": entry.request_id, "error": entry.error, "others": others}
        line |= {name: value for name, value in more.items() if value}
        return json.dumps(line).encode() + b"\n"

    def _append(self, line: bytes) -> None:
        stat = os.fstat(self._fd)
        if stat.st_ino != self._inode():  # moved away by another process
            self._reopen()
        elif stat.st_size and stat.st_size + len(line) > self._file_bytes_max:
            self._rotate(stat.st_ino)
        whole = b"\n" + line if self._is_torn else line
        self._is_torn = os.write(self._fd, whole) != len(whole)
        if self._is_torn:
            raise OSError("the line was written only in part")

    def _inode(self) -> int:
        try:
            return self.path.stat().st_ino
        except FileNotFoundError:
            return 0

    def _reopen(self) -> None:
        fresh = self._open()
        os.close(self._fd)
        self._fd = fresh

    def _rotate(self, full: int) -> None:
        """Rename the files and begin a new one, unless another process did so. `full` is the inode of the
        full file."""
        with lock_folder(self.path.parent):
            if self._inode() == full:
                names = [self.path, *(Path(f"{self.path}.{age}") for age in range(1, self._files_max))]
                for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
                    if newer.exists():
                        newer.replace(older)
            self._reopen()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def open_audit(folder: str | Path | None, name: str) -> AuditLog | None:
    """Open the log in a folder; None without a folder. Raises `InvalidField`."""
    return AuditLog(Path(folder), name) if folder else None

"""An audit log with one line of JSON per request: the caller, the request and the result.

Each caller has a file of its own, `NAME.CALLER.jsonl`; requests without a valid token share `NAME.jsonl`.
Lines are appended and never changed. A line is written to the operating system before the request ends: it
survives a crash of the process, but not a power failure. A full file is renamed, with the time in
milliseconds as its suffix. If all files of a log exceed `LOG_BYTES_MAX`, the oldest full file of the caller
with the most bytes is deleted: a caller can push only its own lines out of the log, until all callers have
the same share. Copy the files elsewhere to keep them longer."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import blake3

from kintsugi.core.errors import InvalidField
from kintsugi.store.protocol.access import Verb
from kintsugi.store.protocol.files import PRIVATE_MODE, lock_folder

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 4 << 20
LOG_BYTES_MAX = 1 << 30
"""Maximum size of all full files of one log."""
KEYS_MAX = 16
"""Maximum number of keys in a line; a digest stands for the keys of a larger request."""
REFUSALS_PERIOD_S = 1.0
"""Failed requests of a caller with the same method and result share one line per period, which counts them.
So do all requests without a valid token."""
REFUSALS_MAX = 4096
"""Maximum number of callers, methods and results whose failed requests are counted."""
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")


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
    """One log. Thread-safe; several processes may share it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        file_bytes_max: int = FILE_BYTES_MAX,
        log_bytes_max: int = LOG_BYTES_MAX,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the log in `folder`, which is created if it is missing. Raises `InvalidField` if files cannot
        be written there."""
        self._folder = folder
        self._name = name
        self._file_bytes_max = file_bytes_max
        self._log_bytes_max = log_bytes_max
        self._clock = clock
        self._lock = threading.Lock()
        self._refusals: dict[tuple[str, ...], tuple[float, int]] = {}
        """By caller, method and result: when the last line was written, and the number of requests since."""
        self.lines_lost = 0
        """Lines that could not be written."""
        path = self.path_of("")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(_open(path))
        except OSError as error:
            raise InvalidField("audit_dir", f"{path} cannot be written ({error.strerror})") from error

    def path_of(self, caller: str) -> Path:
        """Return the current file of a caller; an empty name stands for requests without a valid token."""
        if caller and not _PLAIN.fullmatch(caller):
            plain = re.sub(r"[^A-Za-z0-9_-]", "_", caller)[:48]
            caller = f"{plain}-{blake3.blake3(caller.encode('utf-8', 'surrogatepass')).hexdigest(8)}"
        return self._folder / (f"{self._name}.{caller}.jsonl" if caller else f"{self._name}.jsonl")

    def write(self, entry: AuditEntry) -> None:
        """Append a line. A failure is logged and counted, and the request continues."""
        with self._lock:
            others = self._count(entry)
            if others is None:
                return
            try:
                self._append(self.path_of(entry.caller), self._format(entry, others))
            except OSError as error:
                self.lines_lost += 1
                log.error("a line of the audit log %s was lost (%s); free some disk space", self._name, error)

    def _count(self, entry: AuditEntry) -> int | None:
        """Return how many earlier requests of the same kind the entry's line stands for; None if the entry
        gets no line, because a later one will count it."""
        if entry.caller and not entry.error:
            return 0
        kind = (entry.caller, entry.method, entry.result) if entry.caller else ("",)
        now_s = self._clock()
        written_s, others = self._refusals.get(kind, (float("-inf"), 0))
        if now_s - written_s < REFUSALS_PERIOD_S:
            self._refusals[kind] = (written_s, others + 1)
            return None
        self._refusals.pop(kind, None)
        self._refusals[kind] = (now_s, 0)
        if len(self._refusals) > REFUSALS_MAX:
            del self._refusals[next(iter(self._refusals))]
        return others

    def _format(self, entry: AuditEntry, others: int) -> bytes:
        """Return one line. `others` is the number of further requests that it stands for."""
        time_utc = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="microseconds")
        line: dict[str, object] = {
            "time": time_utc,
            "caller": entry.caller,
            "verb": entry.verb,
            "method": entry.method,
            "namespace": entry.namespace,
            "keys": [*entry.keys[:KEYS_MAX]],
            "result": entry.result,
        }
        more: dict[str, object] = {"request_id": entry.request_id, "error": entry.error, "others": others}
        if len(entry.keys) > KEYS_MAX:
            digest = blake3.blake3("".join(entry.keys).encode("utf-8", "surrogatepass")).hexdigest()
            more |= {"num_keys": len(entry.keys), "keys_digest": digest}
        line |= {name: value for name, value in more.items() if value}
        return json.dumps(line).encode() + b"\n"

    def _append(self, path: Path, line: bytes) -> None:
        fd = _open(path)
        try:
            size = os.fstat(fd).st_size
            if size and size + len(line) > self._file_bytes_max:
                os.close(fd)
                fd = -1
                self._rotate(path, len(line))
                fd = _open(path)
                size = os.fstat(fd).st_size
            is_torn = size and os.pread(fd, 1, size - 1) != b"\n"
            whole = b"\n" + line if is_torn else line
            if os.write(fd, whole) != len(whole):
                raise OSError("the line was written only in part")
        finally:
            if fd >= 0:
                os.close(fd)

    def _rotate(self, path: Path, num_bytes: int) -> None:
        """Rename a file without room for `num_bytes`, unless another process did so, and delete what exceeds
        the log's size."""
        with lock_folder(self._folder):
            fulls = self._find_full()
            if path.exists() and (size := path.stat().st_size) + num_bytes > self._file_bytes_max:
                earlier = fulls.setdefault(path.name, [])
                time_ms = max([int(self._clock() * 1000), *(age_ms + 1 for age_ms, _ in earlier)])
                path.rename(f"{path}.{time_ms}")
                earlier.append((time_ms, size))
            self._delete_excess(fulls)

    def _find_full(self) -> dict[str, list[tuple[int, int]]]:
        """Return suffixes and sizes of full files by the names of the current files, oldest first."""
        fulls: dict[str, list[tuple[int, int]]] = {}
        for found in os.scandir(self._folder):
            current, _, age = found.name.rpartition(".")
            if age.isdecimal() and current.startswith(f"{self._name}."):
                fulls.setdefault(current, []).append((int(age), found.stat().st_size))
        return {current: sorted(files) for current, files in fulls.items()}

    def _delete_excess(self, fulls: dict[str, list[tuple[int, int]]]) -> None:
        sizes = {current: sum(size for _, size in files) for current, files in fulls.items()}
        while sum(sizes.values()) > self._log_bytes_max:
            largest = max(sizes, key=lambda current: sizes[current])
            age_ms, size = fulls[largest].pop(0)
            (self._folder / f"{largest}.{age_ms}").unlink(missing_ok=True)
            sizes[largest] -= size


def _open(path: Path) -> int:
    """Open a file that only its owner may read, for appending. Raises `OSError`, also for a link."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, PRIVATE_MODE)


def open_audit(folder: str | Path | None, name: str) -> AuditLog | None:
    """Open the log in a folder; None without a folder. Raises `InvalidField`."""
    return AuditLog(Path(folder), name) if folder else None

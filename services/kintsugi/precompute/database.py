"""A SQLite database with a lock and our errors, for a job's ledger and a gateway's known chunks."""

from __future__ import annotations

import fcntl
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kintsugi.core.errors import (
    Corrupted,
    KintsugiError,
    ResourceExhausted,
    Unavailable,
    VersionMismatch,
)
from kintsugi.store.protocol.files import make_folder, make_private, sync_path

BUSY_S = 60.0


class Database:
    """One connection to a SQLite file. Thread-safe. Several processes may open the file; writers take
    turns."""

    def __init__(
        self, path: Path | None, schema: str, version: int, remedy: str = "choose another --state"
    ) -> None:
        """Open or create the file; without a path the database is in memory. ``remedy`` is the end of the
        messages about a file that cannot be used.

        Raises `Unavailable`, `ResourceExhausted`, `Corrupted`, and `VersionMismatch` for a newer schema.
        """
        self.path = path
        self._remedy = remedy
        self._lock = threading.RLock()
        with self._translate_errors("opened"):
            if path is not None:
                make_folder(path.parent)
                make_private(path)  # SQLite gives the files beside it the same mode
            self._db = sqlite3.connect(
                path or ":memory:", timeout=BUSY_S, check_same_thread=False, isolation_level=None
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA cache_size=-32768")
            self._db.execute("PRAGMA secure_delete=ON")  # overwrites deleted rows
            (written,) = self._db.execute("PRAGMA user_version").fetchone()
            if written not in (0, version):
                kind = VersionMismatch if written > version else Corrupted
                raise kind(f"{path} was written by another version (schema {written}); {remedy}")
            self._db.executescript(f"{schema} PRAGMA user_version={version};")
            self._file = None if path is None else _identify_file(path)
            if path is not None:
                sync_path(path.parent)

    @contextmanager
    def open_read(self) -> Iterator[sqlite3.Connection]:
        """Lock the connection for reading. Raises `Unavailable` and `Corrupted`."""
        with self._lock, self._translate_errors("read"):
            yield self._db

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit the whole body or nothing. Raises `Unavailable`, `ResourceExhausted` and `Corrupted`."""
        with self._lock, self._translate_errors("written"):
            self._check_file()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite rolls back automatically when the disk is full
                    self._db.execute("ROLLBACK")
                raise

    def scrub(self) -> None:
        """Remove deleted rows from the file and its log. Raises `Unavailable` while another connection reads,
        `ResourceExhausted` and `Corrupted`."""
        if self.path is None:
            return
        with self._lock, self._translate_errors("written"):
            self._check_file()
            (busy, _, _) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise Unavailable(
                f"{self.path} is being read, so its log may still hold deleted rows; erase again"
            )

    def _check_file(self) -> None:
        """Raise `Unavailable` if the file was deleted: SQLite would continue to write to the deleted file."""
        if self.path is not None and _identify_file(self.path) != self._file:
            raise Unavailable(f"{self.path} was deleted; restart to create it again")

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # our own bug, such as the use of a closed connection
        except sqlite3.DatabaseError as error:
            raise self._to_kintsugi_error(error, what) from error
        except OSError as error:
            raise Unavailable(f"{self.path} cannot be {what} ({error.strerror}); {self._remedy}") from error

    def _to_kintsugi_error(self, error: sqlite3.DatabaseError, what: str) -> KintsugiError:
        if "disk is full" in str(error):
            return ResourceExhausted(f"the disk of {self.path} is full; free some space, then try again")
        if not isinstance(error, sqlite3.OperationalError):
            return Corrupted(f"{self.path} cannot be {what} ({error}); {self._remedy}")
        return Unavailable(f"{self.path} cannot be {what} ({error}); check its folder, or {self._remedy}")

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._db.close()


def _identify_file(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if the file does not exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def lock_state(path: Path, taken: str) -> Iterator[None]:
    """Hold an exclusive lock on a file. The lock ends with the process. Raises `Unavailable` with the message
    `taken` if another process holds it."""
    try:
        file = path.open("w")
    except OSError as error:
        raise Unavailable(
            f"{path.parent} cannot be written ({error.strerror}); choose another --state"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(taken) from None
        yield

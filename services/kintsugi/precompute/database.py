"""A SQLite database behind a lock that raises our errors: a job's ledger and a gateway's known chunks."""

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
from kintsugi.store.protocol.durable_files import make_folder, sync_folder
from kintsugi.store.protocol.private_files import make_private

BUSY_S = 60.0


class Database:
    """Thread-safe; one connection. Several processes may hold the file; writers take turns."""

    def __init__(
        self, path: Path | None, schema: str, version: int, remedy: str = "choose another --state"
    ) -> None:
        """Open or create the file; without a path the database lives in memory. ``remedy`` ends messages
        about a file that cannot be used.

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
            self._db.execute("PRAGMA secure_delete=ON")  # what is deleted is overwritten
            (written,) = self._db.execute("PRAGMA user_version").fetchone()
            if written not in (0, version):
                kind = VersionMismatch if written > version else Corrupted
                raise kind(f"{path} was written by another version (schema {written}); {remedy}")
            self._db.executescript(f"{schema} PRAGMA user_version={version};")
            self._file = None if path is None else _identify_file(path)
            if path is not None:
                sync_folder(path.parent)

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
                if self._db.in_transaction:  # SQLite rolls back by itself when the disk is full
                    self._db.execute("ROLLBACK")
                raise

    def scrub(self) -> None:
        """Leave nothing of deleted rows in the file and its log. Raises `Unavailable` while somebody reads,
        `ResourceExhausted` and `Corrupted`."""
        if self.path is None:
            return
        with self._lock, self._translate_errors("written"):
            self._check_file()
            (busy, _, _) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise Unavailable(f"{self.path} is being read, so its log may hold what was deleted; erase again")

    def _check_file(self) -> None:
        """Raise `Unavailable` if the file was deleted: SQLite would go on writing to it unseen."""
        if self.path is not None and _identify_file(self.path) != self._file:
            raise Unavailable(f"{self.path} was deleted; start again, and the file is created anew")

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a bug of ours, such as using a closed connection
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
    """Hold a lock file that only one process can hold; it ends with the process. Raises `Unavailable` with
    the message `taken` if another process holds it."""
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

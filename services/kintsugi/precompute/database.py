"""A SQLite file behind a lock that raises our errors. The ledger and the journal are stored in such files."""

from __future__ import annotations

import fcntl
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kintsugi.core.errors import Corrupted, KintsugiError, ResourceExhausted, Unavailable

BUSY_S = 60.0


class Database:
    """Thread-safe; one connection. Several processes may hold the file; writers take turns."""

    def __init__(self, path: Path, schema: str, version: int) -> None:
        """Open or create the file. Raises `Unavailable`, `ResourceExhausted` and `Corrupted`."""
        self.path = path
        self._lock = threading.RLock()
        with self._translate_errors("opened"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA cache_size=-32768")
            (written,) = self._db.execute("PRAGMA user_version").fetchone()
            if written not in (0, version):
                raise Corrupted(
                    f"{path.parent} was written by another version (schema {written}); use another --state"
                )
            self._db.executescript(f"{schema} PRAGMA user_version={version};")
            found = path.stat()
            self._file = (found.st_dev, found.st_ino)

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

    def _check_file(self) -> None:
        """Raise `Unavailable` if the file was deleted: SQLite would go on writing to it unseen."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._file:
            raise Unavailable(
                f"{self.path} is gone; run the job again: it is rebuilt from the source, and the chunks in "
                "the store stay"
            )

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a bug of ours, such as using a closed connection
        except sqlite3.DatabaseError as error:
            raise self._to_kintsugi_error(error, what) from error
        except OSError as error:
            raise Unavailable(
                f"{self.path.parent} cannot be {what} ({error.strerror}); choose another --state"
            ) from error

    def _to_kintsugi_error(self, error: sqlite3.DatabaseError, what: str) -> KintsugiError:
        if "disk is full" in str(error):
            return ResourceExhausted(
                f"the disk of {self.path} is full; free some space, then run the job again"
            )
        if not isinstance(error, sqlite3.OperationalError):
            return Corrupted(f"{self.path} cannot be {what} ({error}); choose another --state")
        return Unavailable(
            f"{self.path} cannot be {what} ({error}); check its folder, or choose another --state"
        )

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._db.close()


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

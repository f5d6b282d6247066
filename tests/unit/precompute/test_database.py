"""The world's errors below the ledger: what they are called, and that nothing is half written."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from pathlib import Path

import pytest

from kintsugi.core.errors import Corrupted, ResourceExhausted, Unavailable, VersionMismatch
from kintsugi.precompute.database import Database, lock_state

SCHEMA = "CREATE TABLE IF NOT EXISTS word (text BLOB NOT NULL);"


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "state/words.sqlite", SCHEMA, 1)


def count(database: Database) -> int:
    with database.open_read() as db:
        (found,) = db.execute("SELECT count(*) FROM word").fetchone()
    return int(found)


def test_a_body_that_raises_leaves_nothing(database: Database) -> None:
    with pytest.raises(Corrupted, match="NOT NULL"), database.transaction() as db:
        db.executemany("INSERT INTO word VALUES (?)", [("a",), (None,)])
    assert count(database) == 0
    with database.transaction() as db:
        db.execute("INSERT INTO word VALUES ('b')")
    assert count(database) == 1


def test_a_full_disk_is_said_and_nothing_is_half_written(database: Database) -> None:
    with database.open_read() as db:
        db.execute("PRAGMA max_page_count=8")  # what SQLite says then is what it says on a full disk
    with pytest.raises(ResourceExhausted, match="free some space"), database.transaction() as db:
        db.executemany("INSERT INTO word VALUES (?)", [(bytes(4096),) for _ in range(20)])
    assert count(database) == 0
    with database.transaction() as db:
        db.execute("INSERT INTO word VALUES ('fits')")
    assert count(database) == 1


def test_a_folder_that_is_deleted_meanwhile_is_said(database: Database) -> None:
    assert database.path is not None
    shutil.rmtree(database.path.parent)
    with (
        pytest.raises(Unavailable, match="was deleted; restart to create it"),
        database.transaction() as db,
    ):
        db.execute("INSERT INTO word VALUES ('a')")
    Database(database.path, SCHEMA, 1).close()  # another process makes one of the same name
    with (
        pytest.raises(Unavailable, match="was deleted; restart to create it"),
        database.transaction() as db,
    ):
        db.execute("INSERT INTO word VALUES ('a')")


def test_a_file_that_is_no_database_or_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"no database" * 200)
    with pytest.raises(Corrupted, match="--state"):
        Database(tmp_path / "a.sqlite", SCHEMA, 1)
    Database(tmp_path / "b.sqlite", SCHEMA, 1).close()
    with pytest.raises(Corrupted, match="another version"):
        Database(tmp_path / "b.sqlite", SCHEMA, 2)
    Database(tmp_path / "c.sqlite", SCHEMA, 2).close()
    with pytest.raises(VersionMismatch, match="schema 2"):
        Database(tmp_path / "c.sqlite", SCHEMA, 1)


def test_without_a_path_it_lives_in_memory() -> None:
    database = Database(None, SCHEMA, 1)
    with database.transaction() as db:
        db.execute("INSERT INTO word VALUES ('a')")
    assert count(database) == 1
    database.close()


def test_asking_what_is_closed_is_a_mistake_of_ours(database: Database) -> None:
    database.close()
    database.close()
    with pytest.raises(sqlite3.ProgrammingError):
        count(database)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        lock_state(tmp_path / "a.lock", "taken"),
        pytest.raises(Unavailable, match="taken"),
        lock_state(tmp_path / "a.lock", "taken"),
    ):
        pass
    with lock_state(tmp_path / "a.lock", "taken"):
        pass
    with pytest.raises(Unavailable, match="--state"), lock_state(tmp_path / "nowhere/a.lock", "taken"):
        pass


def test_its_owner_alone_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.touch(0o644)  # as earlier versions made it
    database = Database(path, "CREATE TABLE IF NOT EXISTS texts (text TEXT);", 1)
    with database.transaction() as connection:
        connection.execute("INSERT INTO texts VALUES ('a text')")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(["ledger.sqlite", "ledger.sqlite-shm", "ledger.sqlite-wal"], 0o600)
    database.close()

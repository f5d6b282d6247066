from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.store.protocol.access import Verb
from kintsugi.store.protocol.audit import AuditEntry, AuditLog, open_audit

OK = AuditEntry("DeleteChunk", "OK", "search", Verb.DELETE, "docs", ["ab" * 32], "r1")
STRANGER = AuditEntry("DeleteChunk", "UNAUTHENTICATED", error="Unauthenticated: no token")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_did_what_and_how_it_ended(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", "gateway", clock=lambda: 1_800_000_000.0)
    log.write(OK)
    log.close()
    assert lines(tmp_path / "audit/gateway.jsonl") == [
        {
            "time": "2027-01-15T08:00:00.000+00:00",
            "caller": "search",
            "verb": "delete",
            "method": "DeleteChunk",
            "namespace": "docs",
            "keys": ["ab" * 32],
            "result": "OK",
            "request_id": "r1",
        }
    ]
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    again = AuditLog(tmp_path / "audit", "gateway")
    again.write(OK)
    assert len(lines(log.path)) == 2, "a restart appends"


def test_full_files_are_kept_up_to_their_number(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "gateway", file_bytes_max=400, files_max=3)
    for number in range(12):
        log.write(AuditEntry("Generate", "OK", f"caller-{number}"))
    kept = ["gateway.jsonl", "gateway.jsonl.1", "gateway.jsonl.2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    newest_first = [line["caller"] for name in kept for line in reversed(lines(tmp_path / name))]
    assert newest_first == [f"caller-{number}" for number in range(11, 11 - len(newest_first), -1)]
    assert all((tmp_path / name).stat().st_size <= 400 for name in kept)


def test_strangers_cannot_push_others_out_of_the_log(tmp_path: Path) -> None:
    now_s = 100.0
    log = AuditLog(tmp_path, "gateway", clock=lambda: now_s)
    for _ in range(1000):
        log.write(STRANGER)
    log.write(OK)
    now_s += 1
    log.write(STRANGER)
    found = lines(log.path)
    assert [line["caller"] for line in found] == ["", "search", ""]
    assert "others" not in found[0]
    assert found[2]["others"] == 999


def test_two_writers_of_one_file_lose_nothing(tmp_path: Path) -> None:
    logs = [AuditLog(tmp_path, "gateway", file_bytes_max=2000, files_max=100) for _ in range(2)]

    def write(index: int) -> None:
        for number in range(200):
            logs[index].write(AuditEntry("Generate", "OK", f"{index}-{number}"))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {line["caller"] for path in tmp_path.iterdir() for line in lines(path)}
    assert found == {f"{index}-{number}" for index in range(2) for number in range(200)}
    assert [log.lines_lost for log in logs] == [0, 0]


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "gateway")
    log.write(OK)
    log.path.rename(tmp_path / "shipped")
    log.write(OK)
    assert len(lines(log.path)) == len(lines(tmp_path / "shipped")) == 1


def test_a_line_that_does_not_fit_is_counted_and_the_next_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(tmp_path, "gateway")
    whole = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: whole(fd, data[:10]))
        log.write(OK)
    log.write(OK)
    assert log.lines_lost == 1
    assert "free some disk space" in caplog.text
    torn, last = log.path.read_text().splitlines()
    assert (len(torn), json.loads(last)["caller"]) == (10, "search")

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    log.write(OK)
    assert log.lines_lost == 2


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidField, match=r"audit_dir.*cannot be written"):
        AuditLog(tmp_path / "file", "gateway")
    assert open_audit("", "gateway") is None

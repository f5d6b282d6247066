from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import blake3
import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.store.protocol.access import Verb
from kintsugi.store.protocol.audit import AuditEntry, AuditLog, open_audit

OK = AuditEntry("DeleteChunk", "OK", "search", Verb.DELETE, "docs", ["ab" * 32], "r1")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_did_what_and_how_it_ended(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", "gateway", clock=lambda: 1_800_000_000.0)
    log.write(OK)
    assert lines(tmp_path / "audit/gateway.search.jsonl") == [
        {
            "time": "2027-01-15T08:00:00.000000+00:00",
            "caller": "search",
            "verb": "delete",
            "method": "DeleteChunk",
            "namespace": "docs",
            "keys": ["ab" * 32],
            "result": "OK",
            "request_id": "r1",
        }
    ]
    assert stat.S_IMODE(log.path_of("search").stat().st_mode) == 0o600
    again = AuditLog(tmp_path / "audit", "gateway")
    again.write(OK)
    assert len(lines(log.path_of("search"))) == 2, "a restart appends"


def test_full_files_are_kept_up_to_their_size(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "gateway", file_bytes_max=400, log_bytes_max=800)
    for number in range(12):
        log.write(AuditEntry("Generate", "OK", "search", request_id=f"{number:02}"))
    files = sorted(tmp_path.glob("gateway.search.jsonl*"))
    assert [path.name for path in files[:1]] == ["gateway.search.jsonl"]
    assert len(files) == 3
    kept = [line["request_id"] for path in [*files[1:], files[0]] for line in lines(path)]
    assert kept == [f"{number:02}" for number in range(12 - len(kept), 12)]
    assert all(path.stat().st_size <= 400 for path in files)


def test_a_caller_pushes_only_its_own_lines_out_of_the_log(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "gateway", file_bytes_max=1000, log_bytes_max=8000)
    for number in range(12):
        log.write(AuditEntry("DeleteChunk", "OK", "quiet", request_id=f"{number}"))
    for _ in range(2000):
        log.write(AuditEntry("Prefetch", "OK", "loud", keys=["ab" * 32] * 4096))
    quiet = {line["request_id"] for path in tmp_path.glob("gateway.quiet.*") for line in lines(path)}
    assert quiet == {f"{number}" for number in range(12)}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8000 + 2 * 1000 + 3000


def test_many_keys_are_a_number_and_a_digest(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "shard")
    keys = [f"{number:064x}" for number in range(4096)]
    log.write(AuditEntry("delete", "OK", "search", keys=keys))
    (line,) = lines(log.path_of("search"))
    assert (line["keys"], line["num_keys"]) == (keys[:16], 4096)
    assert line["keys_digest"] == blake3.blake3("".join(keys).encode()).hexdigest()
    assert log.path_of("search").stat().st_size < 2048


@pytest.mark.parametrize("caller", ["", "search"])
def test_refusals_share_a_line_per_second(tmp_path: Path, caller: str) -> None:
    now_s = 100.0
    log = AuditLog(tmp_path, "gateway", clock=lambda: now_s)
    refused = AuditEntry("DeleteChunk", "PERMISSION_DENIED", caller, error="PermissionDenied: no")
    for _ in range(1000):
        log.write(refused)
    log.write(OK)
    log.write(AuditEntry("PutChunk", "PERMISSION_DENIED", "search", error="PermissionDenied: no"))
    now_s += 1
    log.write(refused)
    found = [
        line for line in lines(log.path_of(caller)) if line["method"] == "DeleteChunk" and "error" in line
    ]
    assert [line.get("others") for line in found] == [None, 999]
    written = [line["method"] for line in lines(log.path_of("search"))]
    assert [method for method in written if method == "PutChunk"] == ["PutChunk"], "another kind"


def test_names_of_callers_are_no_paths(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "gateway")
    names = ["../../etc/passwd", "a/b", "a_b", "a.b", "é" * 200, "x" * 300]
    for name in names:
        log.write(AuditEntry("Generate", "OK", name))
    found = [*tmp_path.iterdir()]
    assert len(found) == len(names) + 1
    assert {line["caller"] for path in found for line in lines(path)} == set(names)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", "gateway")
    (tmp_path / "other").touch()
    log.path_of("search").symlink_to(tmp_path / "other")
    log.write(OK)
    assert log.lines_lost == 1
    assert (tmp_path / "other").read_bytes() == b""


def test_two_writers_of_one_file_lose_nothing(tmp_path: Path) -> None:
    logs = [AuditLog(tmp_path, "gateway", file_bytes_max=2000) for _ in range(2)]

    def write(index: int) -> None:
        for number in range(200):
            logs[index].write(AuditEntry("Generate", "OK", "search", request_id=f"{index}-{number}"))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {line["request_id"] for path in tmp_path.iterdir() for line in lines(path)}
    assert found == {f"{index}-{number}" for index in range(2) for number in range(200)}
    assert [log.lines_lost for log in logs] == [0, 0]


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "gateway")
    log.write(OK)
    log.path_of("search").rename(tmp_path / "shipped")
    log.write(OK)
    assert len(lines(log.path_of("search"))) == len(lines(tmp_path / "shipped")) == 1


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
    torn, last = log.path_of("search").read_text().splitlines()
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

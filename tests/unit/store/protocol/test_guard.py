from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.access import Access
from kintsugi.store.protocol.audit import KEYS_MAX, AuditLog
from kintsugi.store.protocol.guard import ShardGuard


class NoMetadata:
    def invocation_metadata(self) -> None:
        return None


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path, "shard")


def lines(log: AuditLog) -> list[dict[str, Any]]:
    path = log.path_of("anyone")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_request_that_is_too_large_makes_no_large_line(log: AuditLog) -> None:
    """Else one caller could push what others did out of the log."""
    keys = [bytes(1000)] * (wire.KEYS_MAX + 1)
    request = pb.DeleteRequest(namespace="n" * 100_000, keys=keys)
    guard = ShardGuard(Access(), log)
    with pytest.raises(InvalidField), guard.admit("delete", NoMetadata()) as call:
        call.authorize(request)
    (line,) = lines(log)
    assert line["result"] == "INVALID_ARGUMENT"
    assert len(line["namespace"]) == 1024
    assert len(line["error"]) <= 1024
    assert len(line["keys"]) == KEYS_MAX
    assert {len(key) for key in line["keys"]} == {2 * wire.DIGEST_BYTES}


@pytest.mark.parametrize(("salts", "verb"), [([], "generate"), ([bytes(16)], "delete")])
def test_a_report_of_wrong_tags_is_written_as_the_deletion_that_it_is(
    log: AuditLog, salts: list[bytes], verb: str
) -> None:
    request = pb.VerifyRequest(namespace="acme", keys=[bytes(32)], failed_salts=salts)
    with ShardGuard(Access(), log).admit("verify", NoMetadata()) as call:
        call.authorize(request)
    assert [(line["method"], line["verb"]) for line in lines(log)] == [("verify", verb)]


@pytest.mark.parametrize(
    ("error", "result"), [(asyncio.CancelledError(), "CANCELLED"), (ZeroDivisionError(), "INTERNAL")]
)
def test_a_call_that_ends_otherwise_is_written_too(log: AuditLog, error: BaseException, result: str) -> None:
    guard = ShardGuard(Access(), log)
    with suppress(type(error)), guard.admit("drain", NoMetadata()):
        raise error
    assert [(line["caller"], line["method"], line["result"]) for line in lines(log)] == [
        ("anyone", "drain", result)
    ]


def test_what_only_tells_whether_chunks_are_there_is_not_written(log: AuditLog) -> None:
    guard = ShardGuard(Access(), log)
    with guard.admit("lookup", NoMetadata()) as call:
        call.authorize(pb.LookupRequest(namespace="docs"))
    assert lines(log) == []

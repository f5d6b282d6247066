"""Backup and restore of what cannot be computed again, from files in use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kintsugi.cli.commands.backup import UNSURE_S
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi.core.errors import NotFound
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.precompute.documents import DocumentRef
from kintsugi.precompute.ledger import Ledger, ScannedChunk, ScannedDocument
from kintsugi.precompute.ledger_chunks import pack_tokens
from kintsugi.store.shard.erasure import Scope
from kintsugi.store.shard.opening import ShardSpec, open_shard
from kintsugi.store.shard.server import ShardServer
from tests.contracts.store_contract import FINGERPRINT

SPACE = ChunkSpace(FINGERPRINT, "acme")
KEY = ChunkKey.of(SPACE, [7, 8])
TEXT = "A passage that a gateway knows, long enough to be found in a message. " * 3


def kintsugi(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def folders(root: Path, shards: Sequence[str] = ("shard",)) -> list[str]:
    given = ["--state", str(root / "state"), "--gateway-data", str(root / "gateway")]
    for shard in shards:
        given += ["--shard-data", str(root / shard)]
    return given


def fill(ledger: Ledger, known: KnownChunks) -> None:
    key = KEY.digest
    packed = pack_tokens(b"\7\0\0\0\10\0\0\0")
    document = ScannedDocument("url", 0, "doc", "", b"", 0, (ScannedChunk(key, packed, 2),))
    edition = ledger.open_edition("tea", SPACE, "source", "model", "cut")
    run = ledger.begin_run(edition)
    ledger.record(edition, run, "acme", [document])
    ledger.end_run(run, 0, 0.0, complete=True)
    known.remember("acme", ChunkKey(key), [7, 8], TEXT)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files, `used`, and their backup, `backup`, that another process made while they were in
    use."""
    root = tmp_path_factory.mktemp("original")
    used = root / "used"
    with (
        closing(Ledger(used / "state")) as ledger,
        closing(KnownChunks(used / "gateway/known_chunks")) as known,
        closing(open_shard(ShardSpec(1 << 20, used / "shard"))) as shard,
    ):
        fill(ledger, known)
        shard.reports.put(FINGERPRINT, "gate", b"passed")
        command = [sys.executable, "-c", "from kintsugi.cli.console_script import main; main()", "backup"]
        done = subprocess.run(
            [*command, str(root / "backup"), *folders(used), "--json"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    names = ["state/ledger.sqlite", "gateway/chunks.sqlite", "shard-0/data.mdb"]
    assert json.loads(done.stdout)["files"] == names
    return root


@pytest.fixture
def backup(original: Path, tmp_path: Path) -> Path:
    """A copy of the backup, beside a copy of the files."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path / "backup"


def test_what_was_backed_up_in_use_is_there_after_a_restore(tmp_path: Path, backup: Path) -> None:
    fresh = tmp_path / "fresh"
    result = kintsugi("restore", backup, *folders(fresh))
    assert result.exit_code == 0, result.output
    with (
        closing(Ledger(fresh / "state")) as ledger,
        closing(KnownChunks(fresh / "gateway/known_chunks")) as known,
        closing(open_shard(ShardSpec(1 << 20, fresh / "shard"))) as shard,
    ):
        (chunk,) = ledger.resolve("tea", [DocumentRef("doc", 0)])
        assert chunk is not None
        assert chunk.token_ids == (7, 8)
        assert known.find("acme", f"Look: {TEXT}") == [(6, 6 + len(TEXT))]
        assert shard.reports.get(FINGERPRINT, "gate") == b"passed"


def restored_texts(folder: Path) -> tuple[bool, bool]:
    """Whether the ledger and the gateway have the chunk's text again."""
    with (
        closing(Ledger(folder / "state")) as ledger,
        closing(KnownChunks(folder / "gateway/known_chunks")) as known,
    ):
        try:
            (chunk,) = ledger.resolve("tea", [DocumentRef("doc", 0)])
        except NotFound:
            chunk = None
        return chunk is not None, bool(known.find("acme", f"Look: {TEXT}"))


@pytest.mark.parametrize("scope", [Scope.of("acme", [KEY]), Scope("acme")], ids=["a chunk", "a namespace"])
@pytest.mark.parametrize("where", ["a running shard", "the shard's folder"])
def test_what_was_erased_since_the_backup_does_not_come_back(
    tmp_path: Path, backup: Path, where: str, scope: Scope
) -> None:
    fresh = tmp_path / "fresh"
    given = folders(fresh)
    with closing(open_shard(ShardSpec(1 << 20, fresh / "shard"))) as shard:
        shard.erase(scope, time.time())
        shard.erase(Scope("other"), time.time())
    shutil.rmtree(fresh / "shard/reports")
    if where == "the shard's folder":
        result = kintsugi("restore", backup, *given, "--json")
    else:
        (fresh / "shard").rename(tmp_path / "running")
        with (
            closing(open_shard(ShardSpec(1 << 20, tmp_path / "running"))) as shard,
            ShardServer(shard, "127.0.0.1:0") as server,
        ):
            result = kintsugi("restore", backup, *given, "--store", f"grpc://{server.address}", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["erasures"] == 2
    assert restored_texts(fresh) == (False, False)
    residue = [path for path in fresh.rglob("*") if path.is_file() and TEXT.encode() in path.read_bytes()]
    assert residue == []


def test_what_was_put_again_before_the_backup_comes_back(tmp_path: Path, backup: Path) -> None:
    """Its erasure is older than the backup."""
    fresh = tmp_path / "fresh"
    with closing(open_shard(ShardSpec(1 << 20, fresh / "shard"))) as shard:
        shard.erase(Scope("acme"), time.time() - 2 * UNSURE_S)
    shutil.rmtree(fresh / "shard/reports")
    assert kintsugi("restore", backup, *folders(fresh)).exit_code == 0
    assert restored_texts(fresh) == (True, True)


def test_nothing_is_restored_while_the_store_does_not_say_what_was_erased(
    tmp_path: Path, backup: Path
) -> None:
    fresh = tmp_path / "fresh"
    result = kintsugi("restore", backup, *folders(fresh), "--store", "grpc://127.0.0.1:1")
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert not fresh.exists()


def test_a_restore_that_nobody_tells_of_erasures_says_so(tmp_path: Path, backup: Path) -> None:
    assert "pass --store URL" in kintsugi("restore", backup, *folders(tmp_path / "fresh")).output


def test_files_of_a_backup_are_for_their_owner_alone(tmp_path: Path, backup: Path) -> None:
    assert kintsugi("restore", backup, *folders(tmp_path / "fresh")).exit_code == 0
    files = [path for root in (backup, tmp_path / "fresh") for path in root.rglob("*.sqlite")]
    assert len(files) == 4
    assert all(os.stat(path).st_mode & 0o077 == 0 for path in files)


def test_a_damaged_backup_restores_nothing(tmp_path: Path, backup: Path) -> None:
    file = backup / "gateway/chunks.sqlite"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    result = kintsugi("restore", backup, *folders(tmp_path / "fresh"))
    assert (result.exit_code, "does not match its digest" in result.output) == (5, True)
    assert not (tmp_path / "fresh").exists()


def test_nothing_is_overwritten(tmp_path: Path, backup: Path) -> None:
    used = folders(tmp_path / "used")
    result = kintsugi("restore", backup, *used)
    assert (result.exit_code, "exists; stop the process" in result.output) == (2, True)
    result = kintsugi("backup", backup, *used)
    assert (result.exit_code, "name a new folder" in result.output) == (2, True)


def test_a_backup_and_folders_that_do_not_fit_are_explained(tmp_path: Path, backup: Path) -> None:
    result = kintsugi("restore", backup, "--state", tmp_path / "fresh")
    assert (result.exit_code, "gateway/chunks.sqlite has no destination" in result.output) == (2, True)
    result = kintsugi("restore", tmp_path, "--state", tmp_path / "fresh")
    assert "holds no backup.json" in result.output
    result = kintsugi("backup", tmp_path / "other", *folders(tmp_path / "nowhere"))
    assert "no file to back up" in result.output
    result = kintsugi("backup", tmp_path / "other")
    assert "name at least one of" in result.output
    assert not (tmp_path / "other").exists()

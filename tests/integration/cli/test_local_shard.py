"""The shard that a command brings along."""

from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.cli.session import local_shard
from kintsugi.core.errors import Unavailable
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.registry import open_store
from tests.contracts.store_contract import make_chunk, read_all


def test_a_shard_lasts_as_long_as_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    manifest, frames = make_chunk(range(40))
    with local_shard() as url:
        store = open_store(url)
        assert store.put(manifest, frames)
        assert read_all(store, [manifest.key]) == [(0, layer, frames[layer]) for layer in range(3)]
        assert store.transport == "shared-memory"
        assert list(tmp_path.glob("kintsugi-shard-*/kintsugi.json"))
        store.close()
    assert list(tmp_path.iterdir()) == []
    gone = GrpcStore(url.removeprefix("grpc://"), GrpcOptions(call_timeout_s=2.0))
    with pytest.raises(Unavailable):
        gone.stats()
    gone.close()


def test_a_command_that_fails_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError), local_shard():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []

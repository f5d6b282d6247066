"""Which folder a shard takes, and how it listens; no Ray."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from kintsugi.core.deploy import StoreExpert, StoreSpec, TierSpec
from kintsugi.core.errors import InvalidField
from kintsugi.serving.store_shard import ShardRules, StoreShard, claim_shard, serve_shard
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.protocol import watched_files
from kintsugi.store.shard.eviction import room
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from tests.contracts.store_contract import make_chunk

MIB = 1 / 1024


def spec(folder: Path, **values: object) -> StoreSpec:
    return StoreSpec(ram_gib=16 * MIB, data_dir=str(folder), **values)  # type: ignore[arg-type]


def test_shards_of_a_host_take_folders_of_their_own_and_come_back_to_them(tmp_path: Path) -> None:
    first, second = claim_shard(spec(tmp_path)), claim_shard(spec(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-0", "shard-1"]
    names = [first.shard_id, second.shard_id]
    assert names[0] != names[1]
    first.close()
    again = claim_shard(spec(tmp_path))
    assert again.shard_id == names[0]
    for shard in (again, second):
        shard.close()


def test_tiers_are_divided_like_the_folder(tmp_path: Path) -> None:
    with_tier = spec(tmp_path / "data", tiers=(TierSpec(str(tmp_path / "ssd"), 16 * MIB),))
    shards = [claim_shard(with_tier), claim_shard(with_tier)]
    assert sorted(path.name for path in (tmp_path / "ssd").iterdir()) == ["shard-0", "shard-1"]
    for shard in shards:
        assert [tier.name for tier in shard.tiers] == ["ram", "ssd0"]
        shard.close()


def test_without_a_folder_every_shard_is_new() -> None:
    bare = StoreSpec(ram_gib=16 * MIB)
    shards = [claim_shard(bare), claim_shard(bare)]
    assert shards[0].shard_id != shards[1].shard_id
    for shard in shards:
        shard.close()


def test_a_folder_that_cannot_be_had_for_another_reason_is_no_reason_to_take_the_next(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(InvalidField, match="cannot be written"):
        claim_shard(spec(blocked))


def test_a_shard_is_served_with_its_metrics_on_the_first_free_port(tmp_path: Path) -> None:
    with_metrics = StoreSpec(ram_gib=16 * MIB, data_dir=str(tmp_path))
    shards = [claim_shard(with_metrics), claim_shard(with_metrics)]
    servers = [serve_shard(with_metrics, shard) for shard in shards]
    try:
        addresses = [server.metrics_address for server in servers]
        assert len(set(addresses)) == 2
        for server in servers:
            store = GrpcStore(server.address)
            assert store.stats().chunks == 0
            store.close()
    finally:
        for server, shard in zip(servers, shards, strict=True):
            server.stop()
            shard.close()


def test_a_probe_succeeds_from_when_the_directory_knows_the_shard_until_it_drains(tmp_path: Path) -> None:
    with_metrics = StoreSpec(ram_gib=16 * MIB, data_dir=str(tmp_path))
    waiting = ["the shard is not in the directory yet"]
    shard = claim_shard(with_metrics)
    server = serve_shard(with_metrics, shard, lambda: "".join(waiting))

    def probe() -> tuple[int, str]:
        answer = httpx.get(f"http://{server.metrics_address}/readyz")
        return answer.status_code, answer.text.strip()

    try:
        assert probe() == (503, waiting[0])
        waiting.clear()
        assert probe() == (200, "ready")
        assert "kintsugi_store_chunks" in httpx.get(f"http://{server.metrics_address}/metrics").text
        shard.drain(1.0)
        assert probe() == (503, "the shard drains")
    finally:
        server.stop()
        shard.close()


def test_a_server_whose_loop_stands_still_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = claim_shard(spec(tmp_path))
    server = serve_shard(spec(tmp_path), shard)
    try:
        assert server.why_not_ready() == ""
        monkeypatch.setattr("kintsugi.store.shard.server.STALLED_S", -1.0)
        assert "has not run" in server.why_not_ready()
    finally:
        server.stop()
        shard.close()


def test_a_shard_places_chunks_by_the_ratio_that_its_deployment_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill takes 100 ms, and loading the chunk from the slow tier 20 ms."""
    monkeypatch.delattr(StoreShard, "__del__")
    ssds = tuple(TierSpec(str(tmp_path / name), 16 * MIB) for name in ("fast", "slow"))
    replica = StoreShard.__new__(StoreShard)
    manifest, _ = make_chunk(range(32))
    speeds = [("ssd0", manifest.chunk_bytes / 0.001), ("ssd1", manifest.chunk_bytes / 0.02)]
    monkeypatch.setattr(room, "speeds_of", lambda _queues: speeds)
    with closing(claim_shard(spec(tmp_path / "data", tiers=ssds))) as shard:
        replica._shard, replica._rules, replica._announcer = shard, ShardRules(shard), Mock()
        for told, tier in (({}, "ssd0"), ({"ratio": 0.25}, "ssd1"), ({}, "ssd0")):
            replica.reconfigure({"replication": 1, **told})
            put = shard.table.begin_put(manifest, PutOptions(recompute_ms=100.0), 0.0)
            assert put is not None
            assert put.tier == tier
            shard.table.abort(put)


def test_beyond_loopback_without_tls_is_refused(tmp_path: Path) -> None:
    shard = claim_shard(spec(tmp_path))
    try:
        with pytest.raises(InvalidField, match="insecure"):
            serve_shard(spec(tmp_path, expert=StoreExpert(host="0.0.0.0")), shard)
    finally:
        shard.close()


def test_limits_reach_the_shard_from_the_service_and_from_the_tokens_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "CHECK_S", 0.0)
    shard = claim_shard(StoreSpec(ram_gib=16 * MIB))
    path, rules = tmp_path / "tokens.json", ShardRules(shard)

    def ram_gib(namespace: str) -> float | None:
        limits = shard.table.shares.rules.limits_of(namespace)
        return None if limits is None else limits.ram_gib

    def write(**limits: float) -> None:
        values = {name: {"ram_gib": gib} for name, gib in limits.items()}
        path.write_text(json.dumps({"tokens": [], "limits": values}))
        path.chmod(0o600)

    try:
        write(acme=2)
        service = {"acme": {"ram_gib": 1.0}, "other": {"ram_gib": 3.0}}
        rules.configure({"limits": service, "tokens_file": str(path)})
        assert (ram_gib("acme"), ram_gib("other"), ram_gib("third")) == (2, 3, None)
        write(acme=20)
        rules.refresh()
        assert ram_gib("acme") == 20
        rules.configure({"limits": {"acme": {"ram_gib": 1.0}}, "tokens_file": str(tmp_path / "nowhere")})
        assert (ram_gib("acme"), ram_gib("other")) == (1, None)
        rules.configure({})
        assert ram_gib("acme") is None
    finally:
        shard.close()

"""The deployment `StoreShard`: one shard of the store on its own port, announced to the directory.

Serve starts, watches and restarts it; no request passes through Serve. A replica takes the first folder of
its host that no other process uses, and with it that shard's UUID and chunks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kintsugi.core.deploy import (
    DRAIN_S,
    METRICS_PORTS,
    SHARD_METRICS_PORT,
    SHARD_PORT,
    StoreSpec,
    directory_url,
)
from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.namespaces import NO_RULES, NamespaceRules
from kintsugi.core.schema import load
from kintsugi.gateway.addresses import advertised_address, format_address, free_port, tls_of
from kintsugi.gateway.logs import write_json_lines
from kintsugi.serving.catching_up import CatchingUp
from kintsugi.serving.directory import Announcer, MovingDirectory, ensure_directory
from kintsugi.serving.replica_ports import keep_replica_on_loopback
from kintsugi.store.client.directory import SHARDS_MAX
from kintsugi.store.protocol.access import Access, open_access
from kintsugi.store.protocol.tls import is_loopback
from kintsugi.store.replication import Replicator
from kintsugi.store.shard.eviction.room import RATIO
from kintsugi.store.shard.opening import BucketSpec, ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.bucket import BucketUrl

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""A tenth of Python's default, so that a lookup does not wait 5 ms for a thread that reads the disk."""


def claim_shard(spec: StoreSpec) -> Shard:
    """Open the first shard of this host that no process uses. Raises the errors of `open_shard`."""
    if not spec.data_dir:
        return open_shard(_shard_spec(spec))
    for index in range(SHARDS_MAX):
        try:
            return open_shard(_folders(spec, f"shard-{index}"))
        except Unavailable:
            if not (Path(spec.data_dir) / f"shard-{index}").is_dir():
                raise
    raise Unavailable(f"all {SHARDS_MAX} folders in {spec.data_dir} are in use")


def _shard_spec(spec: StoreSpec) -> ShardSpec:
    return ShardSpec(int(spec.ram_gib * (1 << 30)))


def _folders(spec: StoreSpec, name: str) -> ShardSpec:
    return replace(
        _shard_spec(spec),
        data_dir=Path(spec.data_dir) / name,
        ssds=tuple(SsdSpec(Path(tier.path) / name, int(tier.gib * (1 << 30))) for tier in spec.tiers),
        bucket=_bucket(spec),
    )


def _bucket(spec: StoreSpec) -> BucketSpec | None:
    if not spec.bucket_url:
        return None
    return BucketSpec(BucketUrl.from_text(spec.bucket_url), int(spec.bucket_gib * (1 << 30)))


def serve_shard(spec: StoreSpec, shard: Shard, not_yet: Callable[[], str] = lambda: "") -> ShardServer:
    """Start a shard's server. It is ready when `not_yet` returns "". Raises `Unavailable`, `InvalidField`."""
    expert = spec.expert
    metrics_port = free_port(expert.host, SHARD_METRICS_PORT, METRICS_PORTS)
    options = ServerOptions(
        tls=tls_of(spec),
        insecure=expert.insecure,
        metrics_listen=format_address(expert.host, metrics_port),
        not_yet=not_yet,
        tokens_file=Path(expert.tokens_file) if expert.tokens_file else None,
        audit_dir=Path(expert.audit_dir) if expert.audit_dir else None,
    )
    server = ShardServer(shard, _shard_address(expert.host), options)
    server.start()
    return server


def _shard_address(host: str) -> str:
    """Return the address to listen on: any free port of loopback, or one of a known range on other
    interfaces."""
    port = 0 if is_loopback(f"{host}:0") else free_port(host, SHARD_PORT, METRICS_PORTS)
    return format_address(host, port)


class ShardRules:
    """Applies the service's namespace rules to a shard, overridden by the rules in the gateway's tokens
    file."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._service = NO_RULES
        self._access = Access()

    def configure(self, config: Mapping[str, Any]) -> None:
        """Apply a deployment's `user_config`. Without the tokens file on this host, its rules are left
        out."""
        self._service = load(NamespaceRules, {"limits": config.get("limits", {})}, "store")
        try:
            self._access = open_access(config.get("tokens_file", ""))
        except InvalidField as error:
            log.warning("only the service's limits of stored bytes apply: %s", error)
            self._access = Access()
        self.refresh()

    def refresh(self) -> None:
        """Read the tokens file again if it has changed."""
        self._shard.set_rules(self._service.overridden_by(self._access.rules()))


class StoreShard:
    """A replica: one shard of the store."""

    def __init__(self, store: Mapping[str, Any]) -> None:
        import ray

        write_json_lines()
        keep_replica_on_loopback()
        spec = load(StoreSpec, store, "store")
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._shard = claim_shard(spec)
        self._announcer: Announcer | None = None
        self._rules = ShardRules(self._shard)
        self._server = serve_shard(spec, self._shard, self._not_yet)
        address = advertised_address(self._server.address, ray.util.get_node_ip_address())
        ensure_directory(dict(store))
        directory = MovingDirectory(directory_url(spec))
        self._catching_up = CatchingUp(self._shard, directory, directory.options)
        self._catching_up.start()
        self._announcer = Announcer(
            dict(store),
            self._shard.shard_id,
            address,
            self._is_empty,
            self._catching_up.ask_all,
            directory.move,
        )
        self._replicator = Replicator(self._shard, directory, directory.options)
        self._replicator.start()
        self._stopped = False

    def _not_yet(self) -> str:
        return "" if self._announcer is not None else "the shard is not in the directory yet"

    def _is_empty(self) -> bool:
        return not self._shard.table.used_bytes()

    def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Serve calls this at start and when `user_config` changes."""
        assert self._announcer is not None, "Serve calls this after the constructor"
        self._announcer.configure(int(config["replication"]))
        self._rules.configure(config)
        self._shard.set_ratio(config.get("ratio", RATIO))

    def check_health(self) -> None:
        """Raise `Unavailable` if the shard failed. Serve calls this every few seconds, so it also reads a
        changed tokens file."""
        self._rules.refresh()
        if self._shard.failure is not None:
            raise Unavailable(f"the shard failed ({self._shard.failure!r})")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures that `serving.autoscaling.ShardPolicy` reads."""
        return {
            # Without the bucket, whose capacity does not grow with the shards.
            "used_bytes": float(sum(tier.used_bytes for tier in self._shard.local_tiers)),
            "capacity_bytes": float(sum(tier.capacity_bytes for tier in self._shard.local_tiers)),
            "returns_per_s": self._shard.table.returns_per_s(),
        }

    def __del__(self) -> None:
        """Serve calls this before it stops the replica: leave the map, write back, then end."""
        if getattr(self, "_stopped", True):
            return
        self._stopped = True
        if self._announcer is not None:
            self._replicator.stop()
            self._announcer.close()
            self._catching_up.close()
        left = self._shard.drain(DRAIN_S)
        if left:
            log.warning("%d bytes were not written back in %.0f s", left, DRAIN_S)
        self._server.stop()
        self._shard.close()

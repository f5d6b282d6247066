"""A shard's gRPC server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kintsugi.core.errors import InvalidField, KintsugiError, Unavailable
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.access import open_access
from kintsugi.store.protocol.audit import open_audit
from kintsugi.store.protocol.grpc_server import GrpcServer
from kintsugi.store.protocol.guard import ShardGuard
from kintsugi.store.protocol.metrics_port import MetricsServer
from kintsugi.store.protocol.tls import TlsFiles, check_listen
from kintsugi.store.shard.local import ArenaDoor
from kintsugi.store.shard.service import ChunkStoreService
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.workers.keeper import SCRUB_BYTES_PER_S, Keeper

HEALTH_PERIOD_S = 0.5
STALLED_S = 10.0
"""An event loop that has not reported health for this long answers no calls."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of a shard's server."""

    durable_by_default: bool = False
    """Whether a put without `ack` waits until the chunk is on disk."""
    share_arena: bool = True
    """Whether peers of the same host may map the arena. They can then read every namespace."""
    socket_folder: Path | None = None
    """Folder of the socket that hands out the arena; in a pod, one that its containers share."""
    scrub_bytes_per_s: float = SCRUB_BYTES_PER_S
    """Rate at which chunks are verified in the background; 0: never."""
    tls: TlsFiles | None = None
    insecure: bool = False
    """Whether to listen beyond loopback without TLS."""
    metrics_listen: str = ""
    """`host:port` of the endpoint for Prometheus and readiness probes; empty: none."""
    protect_metrics: bool = False
    """Whether that endpoint's metrics need a token with the verb `admin` on every namespace."""
    not_yet: Callable[[], str] = lambda: ""
    """Returns why a readiness probe must still fail; empty: the shard is ready."""
    tokens_file: Path | None = None
    """Callers with their namespaces and verbs (`store.protocol.access`). None: every client may do
    everything."""
    audit_dir: Path | None = None
    """Folder of the shard's audit log; None: no log."""

    def __post_init__(self) -> None:
        if self.protect_metrics and self.tokens_file is None:
            raise InvalidField("protect_metrics", "requires a tokens file, which names the callers")


class ShardServer:
    """Serves one shard on an event loop of its own thread. A context manager."""

    def __init__(self, shard: Shard, listen: str, options: ServerOptions | None = None) -> None:
        self.shard = shard
        self._listen = listen
        self._options = options or ServerOptions()
        self._keeper = Keeper(shard, self._options.scrub_bytes_per_s)
        self._door: ArenaDoor | None = None
        self._server: GrpcServer | None = None
        self._health: asyncio.Task[None] | None = None
        self._metrics_server: MetricsServer | None = None
        self.address = ""
        """`host:port` of the gRPC server, once started."""
        self.metrics_address = ""
        """`host:port` of the Prometheus endpoint, once started."""
        self._reported_s = 0.0
        """When the event loop last reported health."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen. Raises `Unavailable` if the address cannot be bound, `InvalidField` for one beyond loopback
        without TLS."""
        check_listen(self._listen, self._options.tls, self._options.insecure)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kintsugi-store", daemon=True)
        self._thread.start()
        try:
            self._call(self._start_grpc())
        except (OSError, KintsugiError) as error:
            self._call(self._stop_grpc(0.0))
            self._close_files()
            self._end_loop()
            if isinstance(error, KintsugiError):
                raise
            raise Unavailable(
                f"cannot listen on {self._listen}: {error}; name another address (port 0: any free one)"
            ) from error

    async def _start_grpc(self) -> None:
        options = self._options
        access = open_access(options.tokens_file)
        audit = open_audit(options.audit_dir, f"shard-{self.shard.shard_id}")
        if options.share_arena:
            self._door = ArenaDoor(self.shard.ram.arena, options.socket_folder)
        guard = ShardGuard(access, audit)
        service = ChunkStoreService(self.shard, options.durable_by_default, self._door, options.tls, guard)
        if audit is not None:
            service.metrics.watch_audit(audit)
        self._server = GrpcServer(self._listen, options.tls, access, message_bytes_max=wire.MESSAGE_BYTES_MAX)
        await self._server.start(wire.SERVICE, service.generic_handler())
        self.address = self._server.address
        self._health = asyncio.create_task(self._report_health(self._server))
        self._reported_s = time.monotonic()
        if options.metrics_listen:
            self._metrics_server = service.metrics.serve(
                options.metrics_listen,
                self.why_not_ready,
                self._warning,
                access if options.protect_metrics else None,
            )
            self.metrics_address = self._metrics_server.address
        self._keeper.start()

    async def _report_health(self, server: GrpcServer) -> None:
        """Report NOT_SERVING while the shard drains, after it has failed, and for a tier whose last write or
        read failed. Each tier is its own health service, because the other tiers still serve."""
        while True:
            healthy = self.shard.failure is None and not self.shard.table.draining
            for service in ("", wire.SERVICE):
                await server.set_health(service, healthy)
            failures = self.shard.tier_failures()
            for tier in self.shard.lower_tiers:
                await server.set_health(f"{wire.SERVICE}/{tier.name}", tier.name not in failures)
            self._reported_s = time.monotonic()
            await asyncio.sleep(HEALTH_PERIOD_S)

    def _warning(self) -> str:
        """Return the failures of tiers, which do not make the shard unready."""
        return "; ".join(f"{tier} fails: {why}" for tier, why in self.shard.tier_failures().items())

    def why_not_ready(self) -> str:
        """Return why a readiness probe fails; empty: the shard takes calls."""
        if self.shard.failure is not None:
            return f"the shard failed ({self.shard.failure!r})"
        if self.shard.table.draining:
            return "the shard drains"
        if time.monotonic() - self._reported_s > STALLED_S:
            return f"the gRPC server has not run for {STALLED_S:.0f} s"
        return self._options.not_yet()

    def stop(self, grace_s: float = 5.0) -> None:
        """Let calls finish for `grace_s`, then close the server."""
        self._call(self._stop_grpc(grace_s))
        self._keeper.stop()
        self._close_files()
        if self._metrics_server is not None:
            self._metrics_server.stop()
        self._end_loop()

    async def _stop_grpc(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _close_files(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

"""A shard's gRPC server."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from kintsugi.client import wire
from kintsugi.core.errors import Unavailable
from kintsugi.store.keeper import Keeper
from kintsugi.store.local import ArenaDoor
from kintsugi.store.service import ChunkStoreService
from kintsugi.store.shard import Shard

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_large_buffers() -> None:
    """Stop glibc from mapping and unmapping every 2 MiB message: page faults nearly double gRPC's cost.

    The price is memory: up to the largest burst of messages stays with the process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has no such knob
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_M_TOP_PAD, 64 << 20)


@dataclass(frozen=True)
class ServerOptions:
    """How a shard is served."""

    durable_by_default: bool = False
    """What a put that does not say waits for: the disk, or RAM alone."""
    share_arena: bool = True
    """Whether peers of the same host may map the arena. Whoever may, reads every namespace."""
    socket_folder: Path | None = None
    """Where the socket that hands out the arena lies: a folder that the pod's containers share."""
    scrub_bytes_per_s: float = 0.0
    extra_handlers: tuple[Any, ...] = ()
    """More gRPC services on the same port, such as a shard directory."""


class ShardServer:
    """Serves one shard on an event loop of its own thread. A context manager."""

    def __init__(self, shard: Shard, listen: str, options: ServerOptions | None = None) -> None:
        self.shard = shard
        self._listen = listen
        self._options = options or ServerOptions()
        self._keeper = Keeper(shard, self._options.scrub_bytes_per_s)
        self._door: ArenaDoor | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kintsugi-store", daemon=True)
        self._server: Any = None
        self.address = ""
        """`host:port` that it listens on, once started."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen. Raises `Unavailable` where the address cannot be had."""
        keep_large_buffers()
        self._thread.start()
        try:
            self._call(self._started())
        except RuntimeError as error:
            self._close_door()
            self._end_loop()
            raise Unavailable(f"cannot listen on {self._listen}: {error}") from error

    async def _started(self) -> None:
        self._server = grpc.aio.server(options=wire.CHANNEL_OPTIONS)
        if self._options.share_arena:
            self._door = ArenaDoor(self.shard.ram.arena, self._options.socket_folder)
        service = ChunkStoreService(self.shard, self._options.durable_by_default, self._door)
        self._server.add_generic_rpc_handlers((service.generic_handler(), *self._options.extra_handlers))
        port = self._server.add_insecure_port(self._listen)
        self.address = f"{self._listen.rsplit(':', 1)[0]}:{port}"
        await self._server.start()
        self._keeper.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """Let calls finish for `grace_s`, then end."""
        self._call(self._stopped(grace_s))
        self._keeper.stop()
        self._close_door()
        self._end_loop()

    async def _stopped(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

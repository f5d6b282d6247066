"""A shard directory on gRPC, over any `ShardDirectory`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kintsugi.serving.directory import MESSAGE_BYTES_MAX, DirectoryService
from kintsugi.store.client.directory import DIRECTORY_SERVICE, ShardDirectory
from kintsugi.store.protocol.access import Access
from kintsugi.store.protocol.grpc_server import GrpcServer


@contextmanager
def serving_directory(directory: ShardDirectory) -> Iterator[str]:
    """Serve a directory on an event loop of its own thread, and yield its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> GrpcServer:
        server = GrpcServer("127.0.0.1:0", None, Access(), message_bytes_max=MESSAGE_BYTES_MAX)
        await server.start(DIRECTORY_SERVICE, DirectoryService(directory).generic_handler())
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield server.address
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0.0), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

"""A gateway on gRPC with a stub for an engine, for the length of a test."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kintsugi.core.deploy import GatewaySpec
from kintsugi.gateway.fronts.grpc_server import GatewayServer
from kintsugi.gateway.gateway import Gateway
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.precompute.chunking import Chunker
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.interface import ChunkStore
from tests.fakes.stub_backend import StubBackend, StubDelays

Result = TypeVar("Result")


@dataclass
class Setup:
    """What a test wants otherwise."""

    delays: StubDelays = field(default_factory=StubDelays)
    spec: GatewaySpec = field(default_factory=lambda: GatewaySpec(grpc_port=0))
    max_model_len: int = 4096
    context_token_ids: tuple[int, ...] = ()
    plain_copies: bool = True
    down: bool = False
    """As if no engine answered yet."""
    gateway: dict[str, Any] = field(default_factory=dict)
    """More arguments of `Gateway`."""
    store: ChunkStore | None = None
    """None: an empty `RamStore`."""


@dataclass
class Running:
    """A gateway that is served on a loop of its own."""

    loop: asyncio.AbstractEventLoop
    server: GatewayServer
    gateway: Gateway
    backend: StubBackend
    store: ChunkStore

    @property
    def address(self) -> str:
        return self.server.address

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """In the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def eventually(self, condition: Callable[[], bool]) -> bool:
        """Whether it comes true within five seconds."""

        async def wait() -> bool:
            for _ in range(1000):
                if condition():
                    return True
                await asyncio.sleep(0.005)
            return False

        return self.run(wait())


@contextmanager
def own_logging() -> Iterator[logging.Logger]:
    """What a replica does to its process's logger is undone at the end."""
    logger = logging.getLogger("kintsugi")
    handlers, level, propagate = [*logger.handlers], logger.level, logger.propagate
    try:
        yield logger
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def bundled_tokenize() -> Callable[[str], tuple[int, ...]]:
    return Chunker.of_model(bundled_checkpoint()).token_ids


@contextmanager
def running(setup: Setup | None = None) -> Iterator[Running]:
    setup = setup or Setup()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> Running:
        store = RamStore() if setup.store is None else setup.store
        backend = StubBackend(
            setup.delays,
            store=store,
            max_model_len=setup.max_model_len,
            context_token_ids=setup.context_token_ids,
            plain_copies=setup.plain_copies,
        )
        backend.down = setup.down
        gateway = Gateway(backend, store, bundled_tokenize(), **setup.gateway)
        server = GatewayServer(gateway, setup.spec)
        await server.start()
        return Running(loop, server, gateway, backend, store)

    async def stop(started: Running) -> None:
        await started.server.stop(0.0)
        await started.gateway.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*rest, return_exceptions=True)

    try:
        started = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        try:
            yield started
        finally:
            started.run(stop(started))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def token_file(folder: Path, *grants: tuple[str, tuple[str, ...]]) -> tuple[Path, dict[str, str]]:
    """A file with tokens for names and their namespaces, and the tokens."""
    from kintsugi.gateway.access import add_grant, new_token

    path, tokens = folder / "tokens.json", {}
    for name, namespaces in grants:
        tokens[name], grant = new_token(name, namespaces)
        add_grant(path, grant)
    return path, tokens

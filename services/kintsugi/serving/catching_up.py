"""Applies the erasures that a shard missed, as the other shards recorded them, before clients read from it.

The shard asks every other shard in the map when it starts, when it returns to the map, and every `PERIOD_S`,
because a shard may be in the map and still have missed an erasure.
"""

from __future__ import annotations

import logging
import threading
from contextlib import closing

from kintsugi.core.errors import KintsugiError
from kintsugi.store.client.directory import ShardAddress, ShardDirectory
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.workers.keeper import Turns

log = logging.getLogger(__name__)

PERIOD_S = 10.0


class CatchingUp(Turns):
    """Keeps the erasures of one shard up to date until `close`."""

    def __init__(self, shard: Shard, directory: ShardDirectory, options: GrpcOptions | None = None) -> None:
        """Owns the directory. `options`: how to reach the other shards."""
        super().__init__(shard, "kintsugi-catch-up", PERIOD_S)
        self._directory = directory
        self._options = options
        self._asking = threading.Lock()

    def start(self) -> None:
        """Request the erasures now, then every `PERIOD_S`."""
        self.ask_all()
        super().start()

    def turn(self) -> None:
        self.ask_all()

    def ask_all(self) -> None:
        """Apply the erasures that other shards recorded. Shards that do not answer are called again later."""
        with self._asking:
            try:
                shards = self._directory.current().shards
            except KintsugiError as error:
                log.warning("the other shards' erasures cannot be requested: %s", error)
                return
            for address in shards:
                if address.shard_id != self._shard.shard_id:
                    self._ask(address)

    def _ask(self, address: ShardAddress) -> None:
        peer = address.shard_id
        try:
            with closing(GrpcStore(address.address, self._options)) as store:
                while True:
                    seen = self._shard.erasures.seen_of(peer)
                    found = store.list_erasures(peer, seen, learned=True, asked_by=self._shard.shard_id)
                    if found.shard_id != peer or found.next == seen:
                        return
                    self._shard.apply_erasures(peer, found)
        except KintsugiError as error:
            log.warning("shard %s does not report its erasures: %s", peer, error)

    def close(self) -> None:
        """Stop, and close the directory. Idempotent."""
        self.stop()
        self._directory.close()

"""Applies the erasures that a shard missed, from the records of other shards, before clients read from it.

The shard asks every other shard in the map when it starts and when it returns to the map. Every `PERIOD_S` it
asks the next few of them, because a shard may be in the map and still have missed an erasure. An erasure
that only some shards have recorded thus reaches all of them in a few periods.
"""

from __future__ import annotations

import logging
import random
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
ASKED_AT_ONCE = 8
"""Maximum number of shards that are asked in a period."""


class CatchingUp(Turns):
    """Keeps the erasures of one shard up to date until `close`."""

    def __init__(self, shard: Shard, directory: ShardDirectory, options: GrpcOptions | None = None) -> None:
        """Owns the directory. `options`: how to reach the other shards."""
        super().__init__(shard, "kintsugi-catch-up", PERIOD_S)
        self._directory = directory
        self._options = options
        self._asking = threading.Lock()
        self._to_ask: list[ShardAddress] = []
        """Shards that this round has yet to ask, in random order."""

    def start(self) -> None:
        """Request the erasures of all shards now, then of some every `PERIOD_S`."""
        self.ask_all()
        super().start()

    def turn(self) -> None:
        with self._asking:
            if not self._to_ask:
                self._to_ask = self._find_others()
                random.shuffle(self._to_ask)
            asked, self._to_ask = self._to_ask[:ASKED_AT_ONCE], self._to_ask[ASKED_AT_ONCE:]
            for address in asked:
                self._ask(address)

    def ask_all(self) -> None:
        """Apply the erasures that other shards recorded. Shards that do not answer are called again later."""
        with self._asking:
            for address in self._find_others():
                self._ask(address)

    def _find_others(self) -> list[ShardAddress]:
        try:
            shards = self._directory.current().shards
        except KintsugiError as error:
            log.warning("the other shards' erasures cannot be requested: %s", error)
            return []
        return [one for one in shards if one.shard_id != self._shard.shard_id]

    def _ask(self, address: ShardAddress) -> None:
        peer = address.shard_id
        try:
            with closing(GrpcStore(address.address, self._options)) as store:
                while True:
                    seen = self._shard.erasures.seen_of(peer)
                    found = store.list_erasures(peer, seen, asked_by=self._shard.shard_id)
                    if found.shard_id != peer or found.next == seen:
                        return
                    self._shard.apply_erasures(peer, found)
        except KintsugiError as error:
            log.warning("shard %s does not report its erasures: %s", peer, error)

    def close(self) -> None:
        """Stop, and close the directory. Idempotent."""
        self.stop()
        self._directory.close()

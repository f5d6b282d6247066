"""A shard map that a test sets."""

from __future__ import annotations

from kintsugi.store.client.directory import ShardDirectory, ShardMap


class FixedDirectory(ShardDirectory):
    """The map that `shards` is set to."""

    def __init__(self, shards: ShardMap) -> None:
        self.shards = shards

    def current(self) -> ShardMap:
        return self.shards

    def close(self) -> None:
        return None

"""What has a lifetime leaves a tier before what has none, each in the order of a policy of its own.

Chunks that nobody put, but that an engine discovered, have a lifetime: they use the room that is left. In a
tier that is full of lasting chunks, that is the room of one, because the next one replaces it.
"""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.store.shard.eviction.policy import EvictionPolicy, Item


class LifetimePolicy(EvictionPolicy[Item]):
    """Cost: that of the policies."""

    def __init__(
        self, has_lifetime: Callable[[Item], bool], make_policy: Callable[[], EvictionPolicy[Item]]
    ) -> None:
        """``has_lifetime`` always says the same of an item."""
        self._has_lifetime = has_lifetime
        self._expiring = make_policy()
        self._lasting = make_policy()

    def _policy_of(self, item: Item) -> EvictionPolicy[Item]:
        return self._expiring if self._has_lifetime(item) else self._lasting

    def admit(self, item: Item, size_bytes: int, cost_ms: float) -> None:
        self._policy_of(item).admit(item, size_bytes, cost_ms)

    def touch(self, item: Item) -> None:
        self._policy_of(item).touch(item)

    def remove(self, item: Item) -> None:
        self._policy_of(item).remove(item)

    def evict(self, evictable: Callable[[Item], bool]) -> Item | None:
        victim = self._expiring.evict(evictable)
        return self._lasting.evict(evictable) if victim is None else victim

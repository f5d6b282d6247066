"""What has a lifetime leaves a tier before what has none, each in the order of a policy of its own.

Chunks that nobody put, but that an engine discovered, have a lifetime: they use the room that is left. In a
tier that is full of lasting chunks, that is the room of one, because the next one replaces it. So have chunks
that were put with one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Generic

from kintsugi.store.shard.eviction.policy import EvictionPolicy, Item


class LifetimePolicy(EvictionPolicy[Item]):
    """Cost: that of the policies."""

    def __init__(
        self, has_lifetime: Callable[[Item], bool], make_policy: Callable[[], EvictionPolicy[Item]]
    ) -> None:
        """``has_lifetime`` is asked when an item is admitted. What loses its lifetime later is told by
        `let_last`."""
        self._has_lifetime = has_lifetime
        self._expiring = make_policy()
        self._lasting = make_policy()
        self._short_lived: set[Item] = set()
        """The items that ``_expiring`` has."""

    def _policy_of(self, item: Item) -> EvictionPolicy[Item]:
        return self._expiring if item in self._short_lived else self._lasting

    def admit(self, item: Item, size_bytes: int, cost_ms: float) -> None:
        if self._has_lifetime(item):
            self._short_lived.add(item)
        self._policy_of(item).admit(item, size_bytes, cost_ms)

    def let_last(self, item: Item, size_bytes: int, cost_ms: float) -> None:
        """`item` has no lifetime any more. One that the policy has already given up is ignored."""
        if item in self._short_lived:
            self.remove(item)
            self._lasting.admit(item, size_bytes, cost_ms)

    def touch(self, item: Item) -> None:
        self._policy_of(item).touch(item)

    def remove(self, item: Item) -> None:
        self._policy_of(item).remove(item)
        self._short_lived.discard(item)

    def evict(self, evictable: Callable[[Item], bool]) -> Item | None:
        victim = self._expiring.evict(evictable)
        if victim is None:
            return self._lasting.evict(evictable)
        self._short_lived.discard(victim)
        return victim


class Unrecorded(Generic[Item]):
    """Items whose lifetime is longer than their records say. Thread-safe."""

    def __init__(self) -> None:
        self._items: set[Item] = set()
        self._adding = threading.Lock()
        self._recording = threading.Lock()

    def add(self, item: Item) -> None:
        with self._adding:
            self._items.add(item)

    def record(self, write: Callable[[Collection[Item]], None]) -> None:
        """Have every item recorded that was added before the call, whoever began to record it. Raises what
        ``write`` raises; then they wait for the next call."""
        with self._recording:
            with self._adding:
                items, self._items = self._items, set()
            try:
                if items:
                    write(items)
            except BaseException:
                with self._adding:
                    self._items |= items
                raise

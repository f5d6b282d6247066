"""Orders chunks with a lifetime before lasting chunks, each group by its own policy.

Chunks that an engine has discovered have a lifetime, and so have chunks that were put with one: they use only
the room that lasting chunks leave. In a tier full of lasting chunks, that is the room of one chunk, which the
next one replaces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Generic

from kintsugi.store.shard.eviction.policy import EvictionPolicy, Item


class LifetimePolicy(EvictionPolicy[Item]):
    """Two policies of the same kind, one for items with a lifetime. Cost: that of the policies."""

    def __init__(
        self, has_lifetime: Callable[[Item], bool], make_policy: Callable[[], EvictionPolicy[Item]]
    ) -> None:
        """`has_lifetime` is called when an item is admitted. `let_last` reports that an item has lost its
        lifetime."""
        self._has_lifetime = has_lifetime
        self._expiring = make_policy()
        self._lasting = make_policy()
        self._short_lived: set[Item] = set()
        """The items in `_expiring`."""

    def _policy_of(self, item: Item) -> EvictionPolicy[Item]:
        return self._expiring if item in self._short_lived else self._lasting

    def admit(self, item: Item, size_bytes: int, cost_ms: float) -> None:
        if self._has_lifetime(item):
            self._short_lived.add(item)
        self._policy_of(item).admit(item, size_bytes, cost_ms)

    def let_last(self, item: Item, size_bytes: int, cost_ms: float) -> None:
        """Note that `item` has no lifetime any more. An item that was already given up is ignored."""
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
        """Return when every item added before the call is recorded, by this or another thread. Raises the
        errors of `write`; then the items wait for the next call."""
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

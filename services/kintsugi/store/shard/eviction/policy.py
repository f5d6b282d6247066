"""The order in which chunks leave a full tier: the interface, LRU, S3-FIFO, and policies by name.

A policy only orders; it owns no bytes, reads no clock and never blocks. Sizes and recompute costs are
hints that it may ignore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from kintsugi.core.errors import InvalidField
from kintsugi.core.plugins import EVICTION_POLICIES, load_plugin, plugin_names

Item = TypeVar("Item", bound=Hashable)

SMALL_SHARE = 0.5
GHOST_SHARE = 2.0
GHOSTS_MAX = 1 << 18
"""Items that one policy remembers after they left: 70 MB."""
USES_MAX = 3


def itself(item: Item) -> Hashable:
    """The default identity, for items that never return."""
    return item


class EvictionPolicy(ABC, Generic[Item]):
    """The items of one tier, in the order in which they should leave it.

    A policy is created with the tier's capacity in bytes and `identity`, which returns the same value for an
    item that has left and come back, so that the policy can remember items that have left.
    """

    @abstractmethod
    def admit(self, item: Item, size_bytes: int, cost_ms: float) -> None:
        """Note that `item` entered the tier. `cost_ms`: the time to compute it again; 0: unknown."""

    @abstractmethod
    def touch(self, item: Item) -> None:
        """Note that `item` was used. An item that was already given up is ignored."""

    @abstractmethod
    def remove(self, item: Item) -> None:
        """Note that `item` left for another reason (deleted, expired, quarantined). An unknown item is
        ignored."""

    @abstractmethod
    def evict(self, evictable: Callable[[Item], bool]) -> Item | None:
        """Remove and return the next item that may leave; None if no item may."""


class Lru(EvictionPolicy[Item]):
    """Least recently used first. Cost: constant, plus a step over each item that may not leave."""

    def __init__(self, capacity_bytes: int, identity: Callable[[Item], Hashable] = itself) -> None:
        self._items: OrderedDict[Item, None] = OrderedDict()

    def admit(self, item: Item, size_bytes: int, cost_ms: float) -> None:
        self._items[item] = None

    def touch(self, item: Item) -> None:
        if item in self._items:
            self._items.move_to_end(item)

    def remove(self, item: Item) -> None:
        self._items.pop(item, None)

    def evict(self, evictable: Callable[[Item], bool]) -> Item | None:
        victim = next((item for item in self._items if evictable(item)), None)
        if victim is not None:
            del self._items[victim]
        return victim


class S3Fifo(EvictionPolicy[Item]):
    """S3-FIFO: a small queue for new items, a main queue for items that came back, and a memory of those that
    left.

    Yang et al., SOSP'23, with two parameters changed for chunk traffic: half of the tier is "small", and the
    ghost remembers twice the tier's bytes, because prompts come back after minutes, not seconds. Chosen on
    the first half of a production trace, measured on the second: docs/adr/0005. Cost: constant, plus a step
    over each item that may not leave and for each use that is subtracted from items of the main queue before
    one may leave (at most `USES_MAX` for each item).
    """

    def __init__(self, capacity_bytes: int, identity: Callable[[Item], Hashable] = itself) -> None:
        self._identity = identity
        self._small_bytes_max = int(SMALL_SHARE * capacity_bytes)
        self._ghost_bytes_max = int(GHOST_SHARE * capacity_bytes)
        self._small: OrderedDict[Item, int] = OrderedDict()
        self._main: OrderedDict[Item, int] = OrderedDict()
        self._ghost: OrderedDict[Hashable, int] = OrderedDict()
        self._sizes: dict[Item, int] = {}
        self._small_bytes = 0
        self._ghost_bytes = 0

    def admit(self, item: Item, size_bytes: int, cost_ms: float) -> None:
        self._sizes[item] = size_bytes
        remembered = self._ghost.pop(self._identity(item), None)
        if remembered is None:
            self._small[item] = 0
            self._small_bytes += size_bytes
        else:
            self._ghost_bytes -= remembered
            self._main[item] = 0

    def touch(self, item: Item) -> None:
        queue = self._small if item in self._small else self._main
        if item in queue:
            queue[item] = min(USES_MAX, queue[item] + 1)

    def remove(self, item: Item) -> None:
        size = self._sizes.pop(item, 0)
        if self._small.pop(item, None) is not None:
            self._small_bytes -= size
        else:
            self._main.pop(item, None)

    def evict(self, evictable: Callable[[Item], bool]) -> Item | None:
        refused = {True: 0, False: 0}
        while True:
            from_small = self._small_bytes > self._small_bytes_max or not self._main
            if refused[from_small] >= len(self._small if from_small else self._main):
                from_small = not from_small  # nothing there may leave
            queue = self._small if from_small else self._main
            if refused[from_small] >= len(queue):
                return None
            item, uses = next(iter(queue.items()))
            if not evictable(item):
                queue.move_to_end(item)
                refused[from_small] += 1
            elif uses:
                self._keep(item, uses, from_small)
                refused = {True: 0, False: 0}
            else:
                self._leave(item, from_small)
                return item

    def _keep(self, item: Item, uses: int, from_small: bool) -> None:
        """Move an item that was used to the end of the main queue. It loses one use, or all uses if it was in
        the small queue."""
        if from_small:
            del self._small[item]
            self._small_bytes -= self._sizes[item]
            self._main[item] = 0
        else:
            self._main[item] = uses - 1
            self._main.move_to_end(item)

    def _leave(self, item: Item, from_small: bool) -> None:
        size = self._sizes[item]
        self.remove(item)
        if not from_small:
            return
        self._ghost[self._identity(item)] = size
        self._ghost_bytes += size
        while self._ghost_bytes > self._ghost_bytes_max or len(self._ghost) > GHOSTS_MAX:
            self._ghost_bytes -= self._ghost.popitem(last=False)[1]


class LifetimePolicy(EvictionPolicy[Item]):
    """Orders items with a lifetime before lasting items, each group by its own policy. Cost: that of the
    policies.

    Chunks that an engine has discovered have a lifetime, and so have chunks that were put with one: they use
    only the room that lasting chunks leave. In a tier full of lasting chunks, that is the room of one chunk,
    which the next one replaces.
    """

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


PolicyClass = Callable[[int, Callable[[Any], Hashable]], EvictionPolicy[Any]]

POLICIES: dict[str, PolicyClass] = {"lru": Lru, "s3fifo": S3Fifo}
DEFAULT_POLICY = "s3fifo"


def policy_factory(
    name: str, identity: Callable[[Any], Hashable] = itself
) -> Callable[[int], EvictionPolicy[Any]]:
    """Return a function that makes a policy from a tier's capacity in bytes. `identity`: as in
    `EvictionPolicy`. Raises `InvalidField` for an unknown name, or a policy of another distribution that
    cannot be loaded."""
    make = POLICIES.get(name)
    if make is None:
        added = plugin_names(EVICTION_POLICIES)
        if name not in added:
            raise InvalidField("policy", f"{name!r} is not one of {', '.join(sorted({*POLICIES, *added}))}")
        make = load_plugin(EVICTION_POLICIES, name, "policy", EvictionPolicy)
    return lambda capacity_bytes: make(capacity_bytes, identity)

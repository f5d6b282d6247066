"""The order in which chunks leave a full tier: the interface, and least recently used.

A policy only orders; it owns no bytes, reads no clock and never blocks. Sizes and recompute costs are
hints that it may ignore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


def itself(item: Item) -> Hashable:
    """The identity of an item that has only one life."""
    return item


class EvictionPolicy(ABC, Generic[Item]):
    """The items of one tier, in the order in which they should leave it.

    A policy that has a name is made with the tier's capacity in bytes and ``identity``, which names an item
    across its lives, so that the policy can remember one that has left.
    """

    @abstractmethod
    def admit(self, item: Item, size_bytes: int, cost_ms: float) -> None:
        """`item` entered the tier. `cost_ms`: what computing it again takes; 0 where unknown."""

    @abstractmethod
    def touch(self, item: Item) -> None:
        """`item` was used. An item that the policy has already given up is ignored."""

    @abstractmethod
    def remove(self, item: Item) -> None:
        """`item` left for another reason (deleted, expired, quarantined). An unknown item is ignored."""

    @abstractmethod
    def evict(self, evictable: Callable[[Item], bool]) -> Item | None:
        """Remove and return the next item to leave among those that may; None where none may."""


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

"""S3-FIFO: a small queue for what is new, a main queue for what came back, and a memory of what left.

Yang et al., SOSP'23, with two parameters moved for chunk traffic: half of the tier is "small" and the
ghost remembers twice the tier's bytes, because prompts come back after minutes, not seconds. Chosen on the
first half of a production trace, measured on the second: docs/adr/0005.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from kintsugi.store.shard.eviction.policy import EvictionPolicy, Item, itself

SMALL_SHARE = 0.5
GHOST_SHARE = 2.0
USES_MAX = 3


class S3Fifo(EvictionPolicy[Item]):
    """Cost: constant, but for items that may not leave and for each use that an item of the main queue
    has to lose first (at most `USES_MAX`)."""

    def __init__(self, capacity_bytes: int, identity: Callable[[Item], Hashable] = itself) -> None:
        """`identity` names an item across its lives: what the ghost remembers once the item is gone."""
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
        """It was used meanwhile: to the end of the main queue, with one use less or a clean slate."""
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
        while self._ghost_bytes > self._ghost_bytes_max:
            self._ghost_bytes -= self._ghost.popitem(last=False)[1]

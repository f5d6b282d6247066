"""A bounded cache of a process: the latest items of each namespace, for data other than chunks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar, overload

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ITEM_BYTES = 512
"""Bytes charged for an item with a small key and value. Up to 334 were measured (a key of 32 bytes, two
numbers)."""
NAMESPACE_BYTES = 1024
"""Bytes charged for a namespace that has items, without its name. 605 were measured with one item."""
SHARE_MAX = 0.5
"""Maximum share of the bytes that one namespace may hold, unless it holds a single item."""
KEPT_SHARE = 7 / 8
"""Share of the bytes that stays when room is made."""


class Held(Generic[K, V]):
    """Items by namespace and key, the least recently put first. Not thread-safe, but `get` may run
    concurrently with one thread that puts: it returns the new item or the previous one.

    A namespace beyond its share loses its own oldest items. If all are full, the namespaces with the most
    bytes lose the older half of their items, so others cannot displace a small namespace. Costs constant
    time, amortised."""

    def __init__(self, bytes_max: int, on_drop: Callable[[V], None] = lambda value: None) -> None:
        """`on_drop` is called before an item is dropped for lack of room."""
        self.bytes_max = bytes_max
        self.bytes_by_namespace: dict[str, int] = {}
        """Bytes charged to each namespace with items."""
        self.num_bytes = 0
        """Sum of `bytes_by_namespace`."""
        self._on_drop = on_drop
        self._items: dict[str, OrderedDict[K, tuple[V, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __iter__(self) -> Iterator[tuple[str, K]]:
        return ((namespace, key) for namespace, items in self._items.items() for key in items)

    def items(self, namespace: str) -> list[tuple[K, V]]:
        """Return a namespace's items, the oldest first."""
        return [(key, value) for key, (value, _) in self._items.get(namespace, {}).items()]

    @overload
    def get(self, namespace: str, key: K) -> V | None: ...
    @overload
    def get(self, namespace: str, key: K, default: V) -> V: ...
    def get(self, namespace: str, key: K, default: V | None = None) -> V | None:
        items = self._items.get(namespace)
        item = None if items is None else items.get(key)
        return default if item is None else item[0]

    def put(self, namespace: str, key: K, value: V, size_bytes: int = 0) -> None:
        """Put an item, which becomes the latest of its namespace. `size_bytes`: what its value takes beyond
        `ITEM_BYTES`."""
        items = self._items.setdefault(namespace, OrderedDict())
        before = items.get(key)
        size = ITEM_BYTES + size_bytes
        items[key] = value, size
        items.move_to_end(key)
        self._charge(namespace, size - (before[1] if before else 0))
        while len(items) > 1 and self.bytes_by_namespace[namespace] > SHARE_MAX * self.bytes_max:
            self._drop_oldest(namespace)
        if self.num_bytes > self.bytes_max:
            self._make_room()

    def pop(self, namespace: str, key: K) -> V | None:
        """Remove an item. Returns None if it is not there."""
        items = self._items.get(namespace)
        item = None if items is None else items.pop(key, None)
        if items is None or item is None:
            return None
        self._charge(namespace, -item[1])
        if not items:
            del self._items[namespace], self.bytes_by_namespace[namespace]
            self.num_bytes -= NAMESPACE_BYTES + len(namespace)
        return item[0]

    def _charge(self, namespace: str, size_bytes: int) -> None:
        if namespace not in self.bytes_by_namespace:
            self.bytes_by_namespace[namespace] = NAMESPACE_BYTES + len(namespace)
            self.num_bytes += NAMESPACE_BYTES + len(namespace)
        self.bytes_by_namespace[namespace] += size_bytes
        self.num_bytes += size_bytes

    def _drop_oldest(self, namespace: str) -> None:
        key, (value, _) = next(iter(self._items[namespace].items()))
        self._on_drop(value)
        self.pop(namespace, key)

    def _make_room(self) -> None:
        while self.num_bytes > KEPT_SHARE * self.bytes_max:
            largest = sorted(self.bytes_by_namespace, key=self.bytes_by_namespace.__getitem__, reverse=True)
            for namespace in largest:
                for _ in range((len(self._items[namespace]) + 1) // 2):
                    self._drop_oldest(namespace)
                if self.num_bytes <= KEPT_SHARE * self.bytes_max:
                    return


class Allotment:
    """Amounts of waiting work by namespace. A namespace may have at most `each`, all together at most twice
    that amount, so that one namespace leaves room for others. Not thread-safe."""

    def __init__(self, each: int) -> None:
        self.each = each
        self._used: Counter[str] = Counter()

    def __getitem__(self, namespace: str) -> int:
        return self._used[namespace]

    def fits(self, namespace: str, amount: int) -> bool:
        return self._used[namespace] + amount <= self.each and self.total + amount <= 2 * self.each

    def add(self, namespace: str, amount: int) -> None:
        """Add an amount; a negative amount is subtracted."""
        self._used[namespace] += amount
        if not self._used[namespace]:
            del self._used[namespace]

    @property
    def total(self) -> int:
        return self._used.total()

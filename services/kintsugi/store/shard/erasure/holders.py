"""Calls that hold chunks for as long as their clients take. An erasure cuts those that keep it waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kintsugi.store.shard.entry import Address
from kintsugi.store.shard.erasure.scope import Scope


class Holders:
    """The calls under way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[object, tuple[Sequence[Address], Callable[[], None]]] = {}

    @contextmanager
    def add(self, addresses: Sequence[Address], cut: Callable[[], None]) -> Iterator[None]:
        """Add a call that holds chunks in the `with` block. `cut` ends it: it is called from any thread,
        perhaps more than once, and must not wait."""
        call = object()
        with self._lock:
            self._calls[call] = (addresses, cut)
        try:
            yield
        finally:
            with self._lock:
                del self._calls[call]

    def cut(self, scope: Scope) -> None:
        """End the calls that hold chunks of a scope."""
        with self._lock:
            calls = list(self._calls.values())
        for addresses, cut in calls:
            if any(map(scope.covers, addresses)):
                cut()

"""The calls that an erasure cuts because they hold its chunks, and the wipe that concurrent erasures
share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kintsugi.core.errors import Unavailable
from kintsugi.store.shard.entry import Address
from kintsugi.store.shard.erasure.scope import Scope


class Holders:
    """The running calls. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[object, tuple[Sequence[Address], Callable[[], bool], Callable[[], None]]] = {}

    @contextmanager
    def add(
        self, addresses: Sequence[Address], is_in_the_way: Callable[[], bool], cut: Callable[[], None]
    ) -> Iterator[None]:
        """Register a call that holds chunks during the `with` block. `is_in_the_way` returns whether the
        chunks that it holds were forgotten; other chunks may have their addresses by then. `cut` ends the
        call. Both may be called from any thread and more than once, and must not wait."""
        call = object()
        with self._lock:
            self._calls[call] = addresses, is_in_the_way, cut
        try:
            yield
        finally:
            with self._lock:
                del self._calls[call]

    def cut(self, scope: Scope) -> None:
        """Cut the calls that hold forgotten chunks of a scope."""
        with self._lock:
            calls = list(self._calls.values())
        for addresses, is_in_the_way, cut in calls:
            if any(map(scope.covers, addresses)) and is_in_the_way():
                cut()


class Shared:
    """Runs work once for all callers that came before it began. Thread-safe."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._asked = 0
        self._done = 0
        self._closed = False
        self._counting = threading.Lock()

    def run(self, work: Callable[[], None]) -> None:
        """Return when a whole run has begun and ended after this call. Raises the errors of a run in this
        thread, and `Unavailable` after `close`."""
        with self._counting:
            self._asked += 1
            mine = self._asked
        with self._running:
            if self._done >= mine:
                return
            if self._closed:
                raise Unavailable("this shard is ending; try again after its restart")
            with self._counting:
                covers = self._asked
            work()
            self._done = covers

    def close(self) -> None:
        """Wait for the running work and prevent further runs."""
        with self._running:
            self._closed = True

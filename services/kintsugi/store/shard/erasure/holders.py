"""Calls that hold chunks for as long as their clients take. An erasure cuts those that keep it waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kintsugi.store.shard.entry import Address
from kintsugi.store.shard.erasure.scope import Scope


@dataclass(frozen=True)
class _Holder:
    addresses: Sequence[Address]
    is_in_the_way: Callable[[], bool]
    cut: Callable[[], None]


class Holders:
    """The calls under way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[object, _Holder] = {}

    @contextmanager
    def add(
        self, addresses: Sequence[Address], is_in_the_way: Callable[[], bool], cut: Callable[[], None]
    ) -> Iterator[None]:
        """Add a call that holds chunks in the `with` block.

        `is_in_the_way`: whether what it holds was forgotten; another chunk may have the address by now.
        `cut` ends it. Both are called from any thread, perhaps more than once, and must not wait."""
        call = object()
        with self._lock:
            self._calls[call] = _Holder(addresses, is_in_the_way, cut)
        try:
            yield
        finally:
            with self._lock:
                del self._calls[call]

    def cut(self, scope: Scope) -> None:
        """End the calls that hold forgotten chunks of a scope."""
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            if any(map(scope.covers, call.addresses)) and call.is_in_the_way():
                call.cut()

"""Slots and memory that the callers of a server share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kintsugi.core.errors import ResourceExhausted

SHARE_MAX = 3
SLOTS, BYTES = "slots for requests", "bytes for requests"
"""Units of a `Quota`, for messages."""


class Quota:
    """A number of slots for requests, or of bytes, that callers share. For one event loop.

    Where callers can be told apart, a caller that holds `SHARE_MAX` times as much as is free gets no more: a
    single caller gets three quarters, the next one three quarters of the rest.
    """

    def __init__(self, total: int, what: str, *, shared: bool) -> None:
        """``what``: `SLOTS` or `BYTES`. ``shared``: callers can be told apart."""
        self._total = total
        self._what = what
        self._shared = shared
        self._held: Counter[str] = Counter()

    def take(self, caller: str, amount: int = 1) -> None:
        """``caller``: its name. Raises `ResourceExhausted` and then takes nothing."""
        free = self._total - self._held.total()
        if amount > free:
            raise ResourceExhausted(f"too few of the {self._total} {self._what} are free; try again later")
        if self._shared and (held := self._held[caller]) >= SHARE_MAX * free:
            raise ResourceExhausted(
                f"{caller!r} holds {held} of {self._total} {self._what}, and the remaining {free} are for "
                "other callers; wait until some of your requests have ended"
            )
        self._held[caller] += amount

    def give_back(self, caller: str, amount: int = 1) -> None:
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]

    @contextmanager
    def hold(self, caller: str, amount: int = 1) -> Iterator[None]:
        """Take an amount for as long as the block runs. Raises `ResourceExhausted`."""
        self.take(caller, amount)
        try:
            yield
        finally:
            self.give_back(caller, amount)

"""Memory that requests may hold together: the next that would need more is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kintsugi.core.errors import ResourceExhausted


class ByteBudget:
    """For one event loop. Who takes gives back as much, however its request ends."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises `ResourceExhausted`; then nothing is taken."""
        if self._held_bytes + num_bytes > self._bytes_max:
            raise ResourceExhausted("requests hold all memory that is meant for them; try again later")
        self._held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """As `take`, given back at the end."""
        self.take(num_bytes)
        try:
            yield
        finally:
            self.give_back(num_bytes)

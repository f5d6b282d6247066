"""A thread of a shard that does a bounded amount of work at regular intervals."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from kintsugi.store.shard.shard import Shard


class Turns(ABC):
    """Runs `turn` every `turn_s` from `start` to `stop`. If its thread dies, the shard fails."""

    def __init__(self, shard: Shard, name: str, turn_s: float) -> None:
        self._shard = shard
        self._turn_s = turn_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wait for the running turn, then end. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._turn_s):
                self.turn()
        except BaseException as error:  # noqa: BLE001 - the shard fails, visibly
            if not self._stop.is_set():
                self._shard.table.fail(error)

    @abstractmethod
    def turn(self) -> None:
        """Do a bounded amount of work."""

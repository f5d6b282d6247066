"""The work queue: a bounded set of object keys with due times. Workers take the keys that are due."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from kintsugi.core.errors import KintsugiError
from kintsugi_operator.objects.pods import Manifest

logger = logging.getLogger(__name__)

KEYS_MAX = 10_000
BACKOFF_S_MIN, BACKOFF_S_MAX = 2.0, 120.0
SETTLE_S = 0.2
"""Delay after an event: events come in bursts, and one call handles a whole burst."""


class ObjectKey(NamedTuple):
    """Kind, namespace and name of one of our objects."""

    kind: str
    namespace: str
    name: str

    @staticmethod
    def of(manifest: Manifest) -> ObjectKey:
        """The key of an object."""
        return ObjectKey(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])


class WorkQueue:
    """Passes each key to one worker at a time. A key is due again after the delay that `look` returns, and
    after growing delays while `look` fails."""

    def __init__(
        self, look: Callable[[ObjectKey], Awaitable[float | None]], clock: Callable[[], float]
    ) -> None:
        """`look` returns the seconds until its next call, or None if it need not be called again."""
        self._look = look
        self._clock = clock
        self._due: dict[ObjectKey, float] = {}
        self._busy: set[ObjectKey] = set()
        self._again: set[ObjectKey] = set()
        self._failures: dict[ObjectKey, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: ObjectKey, in_s: float = SETTLE_S) -> None:
        """Schedule a call of `look` for `key` within `in_s` seconds."""
        if key in self._busy:
            self._again.add(key)
            return
        if len(self._due) >= KEYS_MAX and key not in self._due:
            logger.error("more than %d objects: %s is ignored", KEYS_MAX, key)
            return
        due = self._clock() + in_s
        self._due[key] = min(due, self._due.get(key, due))
        self._changed.set()

    async def run(self) -> None:
        """Take the keys that are due, until cancelled."""
        while True:
            now = self._clock()
            key = min(self._due, key=self._due.__getitem__, default=None)
            if key is None or self._due[key] > now:
                self._changed.clear()
                timeout = None if key is None else self._due[key] - now
                # Not `wait_for`: in Python 3.11 it loses a cancellation that arrives together with the event.
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self._changed.wait()
                continue
            del self._due[key]
            await self._take(key)

    async def _take(self, key: ObjectKey) -> None:
        self._busy.add(key)
        try:
            again_s = await self._look(key)
            self._failures.pop(key, None)
        except KintsugiError as error:
            again_s = self._backoff_s(key)
            logger.warning("%s %s/%s: %s; next try in %.0f s", *key, error, again_s)
        except Exception:
            again_s = self._backoff_s(key)
            logger.exception("%s %s/%s: unexpected error; next try in %.0f s", *key, again_s)
        finally:
            self._busy.discard(key)
        if key in self._again:
            self._again.discard(key)
            again_s = SETTLE_S if again_s is None else min(again_s, SETTLE_S)
        if again_s is not None:
            self.add(key, again_s)

    def _backoff_s(self, key: ObjectKey) -> float:
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        return float(min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** (failures - 1)))

"""Writes Events.

Changes with the same reason and message become one Event with a count. An object may cause `BURST` Events at
once and one more every `REFILL_S` seconds; further changes are only logged.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from kintsugi.core.errors import KintsugiError
from kintsugi_operator.controller.cluster import EVENT, ApiServer
from kintsugi_operator.objects.names import FIELD_MANAGER, digest, fit_name
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.changes import Change
from kintsugi_operator.observed.conditions import timestamp

logger = logging.getLogger(__name__)
T = TypeVar("T")

BURST = 12
REFILL_S = 60.0
REMEMBERED_MAX = 4096
"""Maximum number of objects, and of Events, in memory."""
MESSAGE_LENGTH_MAX = 1024
NAME_LENGTH_MAX = 253


@dataclass
class _Budget:
    """The number of Events that an object may still cause."""

    left: float
    at_s: float

    def take(self, now_s: float) -> bool:
        """Take one. Returns False if none is left."""
        self.left = min(float(BURST), self.left + (now_s - self.at_s) / REFILL_S)
        self.at_s = now_s
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass
class _Series:
    """An Event that may repeat."""

    since: str
    count: int = 0


class EventRecorder:
    """Writes changes of an object as its Events. Never fails: reconciling must not depend on Events."""

    def __init__(self, cluster: ApiServer, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._budgets: OrderedDict[str, _Budget] = OrderedDict()
        self._series: OrderedDict[str, _Series] = OrderedDict()

    async def record(self, live: Manifest, changes: Sequence[Change]) -> None:
        """Write an Event for each change of the object `live`."""
        for change in changes:
            metadata = live["metadata"]
            where = (live["kind"], metadata["namespace"], metadata["name"])
            if not self._take(metadata["uid"]):
                logger.warning("%s %s/%s: %s: %s (too many Events)", *where, change.reason, change.message)
                continue
            try:
                await self._cluster.apply(self._manifest(live, change))
            except KintsugiError as error:
                logger.warning("%s %s/%s: no Event for %s: %s", *where, change.reason, error)

    def _take(self, uid: str) -> bool:
        now_s = self._clock().timestamp()
        return _remember(self._budgets, uid, _Budget(float(BURST), now_s)).take(now_s)

    def _manifest(self, live: Manifest, change: Change) -> Manifest:
        metadata, now = live["metadata"], timestamp(self._clock())
        message = change.message[:MESSAGE_LENGTH_MAX]
        key = digest([metadata["uid"], change.reason, message])
        name = fit_name(f"{metadata['name']}.{key}", NAME_LENGTH_MAX)
        series = _remember(self._series, f"{metadata['namespace']}/{name}", _Series(now))
        series.count += 1
        involved = {"apiVersion": live["apiVersion"], "kind": live["kind"]}
        involved |= {key: metadata[key] for key in ("name", "namespace", "uid")}
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": involved,
            "type": "Warning" if change.is_warning else "Normal",
            "reason": change.reason,
            "message": message,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "count": series.count,
            "firstTimestamp": series.since,
            "lastTimestamp": now,
        }


def _remember(memory: OrderedDict[str, T], key: str, new: T) -> T:
    """Return the value of a key, or store `new`. Drops the least recently used of too many keys."""
    value = memory.setdefault(key, new)
    memory.move_to_end(key)
    if len(memory) > REMEMBERED_MAX:
        memory.popitem(last=False)
    return value

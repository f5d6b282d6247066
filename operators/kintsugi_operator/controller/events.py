"""Writes Events: few, and each once.

Two changes with the same reason and message are one Event that counts. An object may cause `BURST` writes at
once and one more each `REFILL_S` seconds; what exceeds that is in the log alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from kintsugi.core.errors import KintsugiError
from kintsugi_operator.controller.cluster import EVENT, ApiServer
from kintsugi_operator.desired.plan import timestamp
from kintsugi_operator.objects.names import FIELD_MANAGER, digest, fit_name
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.changes import Change

logger = logging.getLogger(__name__)

BURST = 12
REFILL_S = 60.0
REMEMBERED_MAX = 4096
"""Number of objects and of Events that are remembered."""
MESSAGE_LENGTH_MAX = 1024
NAME_LENGTH_MAX = 253


@dataclass
class _Budget:
    """How many more Events an object may cause."""

    left: float
    at_s: float

    def take(self, now_s: float) -> bool:
        """Take one, if there is one."""
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
    """Tells of changes as Events of the object that changed. Never fails: an Event is no part of the work."""

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
        budget = self._budgets.setdefault(uid, _Budget(float(BURST), now_s))
        self._budgets.move_to_end(uid)
        if len(self._budgets) > REMEMBERED_MAX:
            self._budgets.popitem(last=False)
        return budget.take(now_s)

    def _manifest(self, live: Manifest, change: Change) -> Manifest:
        metadata, now = live["metadata"], timestamp(self._clock())
        message = change.message[:MESSAGE_LENGTH_MAX]
        key = digest([metadata["uid"], change.reason, message])
        name = fit_name(f"{metadata['name']}.{key}", NAME_LENGTH_MAX)
        series = self._series.setdefault(f"{metadata['namespace']}/{name}", _Series(now))
        self._series.move_to_end(f"{metadata['namespace']}/{name}")
        if len(self._series) > REMEMBERED_MAX:
            self._series.popitem(last=False)
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

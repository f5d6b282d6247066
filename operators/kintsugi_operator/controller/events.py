"""Writes Events. All Events of one object with the same reason are one, which shows the latest message."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime

from kintsugi.core.errors import KintsugiError
from kintsugi_operator.controller.cluster import EVENT, ApiServer
from kintsugi_operator.objects.names import FIELD_MANAGER, digest, fit_name
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.changes import Change
from kintsugi_operator.observed.conditions import timestamp

logger = logging.getLogger(__name__)

REPEAT_S = 30.0
"""Minimum time between two writes of the same Event. Changes within this time are only logged."""
REMEMBERED_MAX = 4096
"""Maximum number of Events whose last write is remembered."""
MESSAGE_LENGTH_MAX = 1024
NAME_LENGTH_MAX = 253


class EventRecorder:
    """Writes changes of an object as its Events. Never fails: reconciling must not depend on Events."""

    def __init__(self, cluster: ApiServer, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._written: OrderedDict[str, datetime] = OrderedDict()

    async def record(self, live: Manifest, changes: Sequence[Change]) -> None:
        """Write an Event for each change of the object `live`."""
        metadata = live["metadata"]
        where = f"{live['kind']} {metadata['namespace']}/{metadata['name']}"
        for change in changes:
            now, key = self._clock(), digest([metadata["uid"], change.reason])
            last = self._written.get(key)
            if last is not None and (now - last).total_seconds() < REPEAT_S:
                logger.info("%s: %s: %s (its Event was just written)", where, change.reason, change.message)
                continue
            self._written[key] = now
            self._written.move_to_end(key)
            if len(self._written) > REMEMBERED_MAX:
                self._written.popitem(last=False)
            try:
                await self._cluster.apply(_event(live, change, key, timestamp(now)))
            except KintsugiError as error:
                logger.warning("%s: no Event for %s: %s", where, change.reason, error)


def _event(live: Manifest, change: Change, key: str, now: str) -> Manifest:
    metadata = live["metadata"]
    involved = {"apiVersion": live["apiVersion"], "kind": live["kind"]}
    involved |= {name: metadata[name] for name in ("name", "namespace", "uid")}
    name = fit_name(f"{metadata['name']}.{key}", NAME_LENGTH_MAX)
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": involved,
        "type": "Warning" if change.is_warning else "Normal",
        "reason": change.reason,
        "message": change.message[:MESSAGE_LENGTH_MAX],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": now,
        "lastTimestamp": now,
    }

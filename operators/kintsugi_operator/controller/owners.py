"""Decides which of several operators owns a service. The others leave the service alone.

The service's status names its owner by the Lease that the owner's leader holds. An operator of single
namespaces takes precedence over one of the whole cluster. Otherwise the first owner stays until its Lease
expires.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kintsugi_operator.api.status import OperatorStatus
from kintsugi_operator.controller.cluster import LEASE, ApiServer, Refused
from kintsugi_operator.controller.election import Sight

logger = logging.getLogger(__name__)

CLUSTER, NAMESPACE = "Cluster", "Namespace"
"""Values of `OperatorStatus.scope`."""
GONE_S = 30.0
"""An operator counts as gone if its Lease was not renewed for this long. Another of its replicas would have
taken the Lease after half of this time."""
OWNERS_MAX = 100


class Owners:
    """Decides whether this operator owns a service. Remembers the Leases of other operators as last seen."""

    def __init__(self, cluster: ApiServer, me: OperatorStatus, clock: Callable[[], float]) -> None:
        """`clock`: seconds. It is never compared with other machines' clocks."""
        self.me = me
        self._cluster = cluster
        self._clock = clock
        self._sights: dict[str, Sight] = {}

    async def is_mine(self, owner: OperatorStatus) -> bool:
        """Whether this operator owns, or may take over, a service with this owner."""
        if owner.lease in ("", self.me.lease) or (self.me.scope, owner.scope) == (NAMESPACE, CLUSTER):
            return True
        return await self._is_gone(owner.lease)

    async def _is_gone(self, lease: str) -> bool:
        """Whether a Lease was not renewed for `GONE_S`; False if this operator may not read it."""
        if lease not in self._sights:
            logger.warning("operator %s owns services here; %s ignores them", lease, self.me.lease)
        namespace, _, name = lease.partition("/")
        now_s = self._clock()
        if len(self._sights) >= OWNERS_MAX:
            self._sights.clear()
        sight = self._sights.setdefault(lease, Sight(since_s=now_s))
        try:
            live = await self._cluster.get(LEASE, namespace, name)
        except Refused:
            return False
        sight = self._sights[lease] = sight.update((live or {}).get("spec") or {}, now_s)
        return now_s - sight.since_s >= GONE_S

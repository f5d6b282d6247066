"""Whether the operator that owns a service still runs: its Lease says so."""

from __future__ import annotations

from collections.abc import Callable

from kintsugi_operator.api.status import OperatorStatus
from kintsugi_operator.controller.cluster import LEASE, ApiServer, Refused
from kintsugi_operator.controller.election import Sight
from kintsugi_operator.desired.ownership import Claim, decide_claim

GONE_S = 30.0
"""An operator whose Lease has not been renewed for so long is gone. Another of its replicas would have taken
the Lease after half of that."""
OWNERS_MAX = 100


class Owners:
    """Decides about claims, with what it has seen of other operators' Leases."""

    def __init__(self, cluster: ApiServer, me: OperatorStatus, clock: Callable[[], float]) -> None:
        """`clock`: seconds. Clocks of other machines are not compared with it."""
        self.me = me
        self._cluster = cluster
        self._clock = clock
        self._sights: dict[str, Sight] = {}

    async def decide(self, owner: OperatorStatus) -> Claim:
        """What to do about a service with this owner."""
        claim = decide_claim(self.me, owner)
        return Claim.TAKE if claim is Claim.LEAVE and await self._is_gone(owner.lease) else claim

    async def _is_gone(self, lease: str) -> bool:
        """Whether a Lease has not been renewed for `GONE_S`. A Lease that may not be read says nothing."""
        namespace, _, name = lease.partition("/")
        try:
            live = await self._cluster.get(LEASE, namespace, name)
        except Refused:
            return False
        now_s = self._clock()
        sight = self._sights.get(lease, Sight(since_s=now_s)).again((live or {}).get("spec") or {}, now_s)
        if len(self._sights) >= OWNERS_MAX:
            self._sights.clear()
        self._sights[lease] = sight
        return now_s - sight.since_s >= GONE_S

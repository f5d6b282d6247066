"""Whether the operator that owns a service still runs, from its Lease."""

from __future__ import annotations

from collections.abc import Callable

from kintsugi_operator.api.status import OperatorStatus
from kintsugi_operator.controller.cluster import LEASE, ApiServer, Refused
from kintsugi_operator.controller.election import Sight
from kintsugi_operator.desired.ownership import Claim, decide_claim

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

    async def decide(self, owner: OperatorStatus) -> Claim:
        """Decide what to do about a service with this owner."""
        claim = decide_claim(self.me, owner)
        return Claim.TAKE if claim is Claim.LEAVE and await self._is_gone(owner.lease) else claim

    async def _is_gone(self, lease: str) -> bool:
        """Whether a Lease was not renewed for `GONE_S`; False if this operator may not read it."""
        namespace, _, name = lease.partition("/")
        try:
            live = await self._cluster.get(LEASE, namespace, name)
        except Refused:
            return False
        now_s = self._clock()
        sight = self._sights.get(lease, Sight(since_s=now_s)).update((live or {}).get("spec") or {}, now_s)
        if len(self._sights) >= OWNERS_MAX:
            self._sights.clear()
        self._sights[lease] = sight
        return now_s - sight.since_s >= GONE_S

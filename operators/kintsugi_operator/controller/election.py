"""Leader election: a Lease names the operator that leads. An operator that loses the Lease exits.

The Kubernetes client library has an election, but in version 37.0.2 its `LeaseLock` cannot create a Lease (it
passes a bool where its own generated client expects text), does not catch connection errors and waits five
minutes for an answer. The rules here are few and pure: `may_hold` decides as client-go does, and compares
only times of this machine's clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kintsugi.core.errors import KintsugiError
from kintsugi_operator.controller.cluster import DEPLOYMENT, LEASE, NOT_FOUND, ApiServer, Refused
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import is_leaving

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """Times of a lease, in seconds."""

    lease_s: float = 15
    """How long candidates wait after the last renewal that they saw."""
    renew_deadline_s: float = 10
    """How long a leader tries to renew before it gives up: less than `lease_s`, so that two never lead."""
    retry_s: float = 2
    """Delay between two attempts."""
    try_s: float = 5
    """Maximum duration of an attempt."""


TERMS = Terms()


class LeaseLost(Exception):
    """The Lease could not be renewed. Another operator may lead by now, so this process must stop."""


@dataclass(frozen=True)
class Sight:
    """The holder and renewal time of a Lease, and when a candidate first saw both."""

    holder: str = ""
    renewed: str = ""
    since_s: float = 0.0

    def update(self, spec: Manifest, now_s: float) -> Sight:
        """Update with the Lease's present spec. A renewal restarts the wait."""
        holder, renewed = str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or "")
        if (holder, renewed) == (self.holder, self.renewed):
            return self
        return Sight(holder, renewed, now_s)


def may_hold(sight: Sight, identity: str, lease_s: float, now_s: float) -> bool:
    """Whether a candidate may renew or take a Lease. Never compares the holder's clock with ours."""
    return sight.holder in ("", identity) or now_s - sight.since_s >= lease_s


class Candidate:
    """An operator process that may become the leader."""

    def __init__(
        self,
        cluster: ApiServer,
        name: str,
        namespace: str,
        identity: str,
        deployment: str = "",
        terms: Terms = TERMS,
    ) -> None:
        """`deployment`: owner of the Lease, so that Kubernetes deletes both together; empty: none."""
        self.terms = terms
        self._deployment = deployment
        self._cluster = cluster
        self._name = name
        self._namespace = namespace
        self._identity = identity
        self._sight = Sight()

    async def attempt(self, now_s: float) -> bool:
        """Try to take or renew the Lease. Returns whether it is held now; False if there is no answer."""
        try:
            async with asyncio.timeout(self.terms.try_s):
                return await self._attempt(now_s)
        except (KintsugiError, TimeoutError) as error:
            logger.warning("%s: %s", self, str(error) or "the API server does not answer")
            return False

    async def release(self) -> None:
        """Give up the Lease, so that the next candidate need not wait."""
        with suppress(KintsugiError, TimeoutError):
            async with asyncio.timeout(self.terms.try_s):
                live = await self._cluster.get(LEASE, self._namespace, self._name)
                if live is not None and live["spec"].get("holderIdentity") == self._identity:
                    await self._cluster.replace({**live, "spec": {**live["spec"], "holderIdentity": ""}})

    async def _attempt(self, now_s: float) -> bool:
        live = await self._cluster.get(LEASE, self._namespace, self._name)
        if live is None:
            await self._cluster.create(self._manifest({"metadata": await self._metadata()}))
            return True
        self._sight = self._sight.update(live.get("spec") or {}, now_s)
        if not may_hold(self._sight, self._identity, self.terms.lease_s, now_s):
            return False
        # The write names the `resourceVersion` that was read, so one of two concurrent writes is refused.
        await self._cluster.replace({**live, **self._manifest(live)})
        return True

    async def _metadata(self) -> Manifest:
        """The metadata of a new Lease. Raises `Refused` if the Deployment that would own it is gone."""
        metadata: Manifest = {"name": self._name, "namespace": self._namespace}
        if not self._deployment:
            return metadata
        found = await self._cluster.get(DEPLOYMENT, self._namespace, self._deployment)
        if found is None or is_leaving(found):
            raise Refused(f"POST {self}", NOT_FOUND, f"its owner, Deployment {self._deployment}, is gone")
        owner = {"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind}
        owner |= {key: found["metadata"][key] for key in ("name", "uid")}
        return {**metadata, "ownerReferences": [owner]}

    def _manifest(self, live: Manifest) -> Manifest:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = live.get("spec") or {}
        is_renewal = before.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self.terms.lease_s),
            "acquireTime": before.get("acquireTime", now) if is_renewal else now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (bool(before) and not is_renewal),
        }
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": live["metadata"],
            "spec": spec,
        }

    def __str__(self) -> str:
        return f"Lease {self._namespace}/{self._name}"


async def lead(candidate: Candidate, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Wait for the Lease, then work for as long as it can be renewed.

    Raises `LeaseLost` when the Lease cannot be renewed, and what the work raises.
    """
    clock, terms = asyncio.get_running_loop().time, candidate.terms
    while not await candidate.attempt(clock()):
        await asyncio.sleep(terms.retry_s)
    working = asyncio.create_task(work())
    renewed_s = clock()
    try:
        while not working.done():
            await asyncio.wait({working}, timeout=terms.retry_s)
            begun_s = clock()
            if await candidate.attempt(begun_s):
                renewed_s = begun_s
            elif clock() - renewed_s >= terms.renew_deadline_s:
                raise LeaseLost(f"{candidate} could not be renewed for {terms.renew_deadline_s:g} s")
        working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        # Only after the work has ended.
        await candidate.release()

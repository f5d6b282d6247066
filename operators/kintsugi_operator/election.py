"""One of several operators leads: a Lease says which. Who loses it ends.

The library's election and its `LeaseLock` do the work. Its lock knows refusals of the API server, but lets
errors of the connection through, which would end a leader at the first lost packet; and it waits for five
minutes. `PatientLock` turns both into a failed try: the lease is lost only when the renew deadline passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import ClientError
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

logger = logging.getLogger(__name__)
T = TypeVar("T")

LEASE_S = 15
RENEW_DEADLINE_S = 10
RETRY_S = 2
TRY_S = 5.0
"""One request to the API server."""


class LeaseLost(Exception):
    """Another may lead by now: whatever this process still does has to end."""


class PatientLock(LeaseLock):  # type: ignore[misc]
    """A lock whose tries fail, instead of the process."""

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        failed = ApiException(status=0, reason="the API server does not answer")
        found: tuple[bool, Any] = await _tried(super().get(name, namespace), (False, failed))
        return found

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        return await _tried(super().create(name, namespace, election_record), False)

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        return await _tried(super().update(name, namespace, updated_record), False)


async def _tried(attempt: Awaitable[T], failed: T) -> T:
    try:
        return await asyncio.wait_for(attempt, TRY_S)
    except (ClientError, OSError, TimeoutError) as error:
        logger.warning("the lease cannot be reached: %s", error)
        return failed


async def lead(
    client: ApiClient,
    name: str,
    namespace: str,
    identity: str,
    work: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Wait for the lease, then work, as long as it can be renewed.

    Raises `LeaseLost` where it cannot, and whatever the work raises. The work is not expected to end.
    """
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def working() -> None:
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not ended.done():
                ended.set_exception(error)
            raise
        if not ended.done():
            ended.set_result(None)

    async def lost() -> None:
        if not ended.done():
            ended.set_exception(
                LeaseLost(f"{namespace}/{name} could not be renewed for {RENEW_DEADLINE_S} s")
            )

    lock = PatientLock(name, namespace, identity, client)
    election = LeaderElection(
        Config(lock, LEASE_S, RENEW_DEADLINE_S, RETRY_S, onstarted_leading=working, onstopped_leading=lost)
    )
    task = asyncio.create_task(election.run())
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            task.result()  # the election itself has failed
        await ended
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""Which shards of a Ray cluster are alive. Shards report to one named actor, and clients ask it over gRPC.

Ray restarts a dead actor on the head node and at its old port. A restarted directory gives no map until every
shard has had time to report: clients keep the map they have, instead of one that lacks half of the shards.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import grpc

from kintsugi.core.deploy import StoreSpec
from kintsugi.core.errors import InvalidField, KintsugiError, ResourceExhausted, Unavailable
from kintsugi.core.schema import load
from kintsugi.gateway.addresses import advertised_address, format_address, is_wildcard, tls_of
from kintsugi.serving.directory_service import DirectoryService
from kintsugi.store.client.directory import SHARDS_MAX, ShardAddress, ShardDirectory, ShardMap
from kintsugi.store.client.grpc_store import tls_files_of
from kintsugi.store.protocol.server_options import SERVER_OPTIONS
from kintsugi.store.protocol.tls import ServerTls, TlsFiles, check_listen

log = logging.getLogger(__name__)

ACTOR_NAME = "kintsugi-directory"
RAY_NAMESPACE = "kintsugi"
HEARTBEAT_S = 1.0
LEASE_S = 5.0
"""A shard that has not reported for this long is dead to clients. Several heartbeats, since busy shards are
late."""
CALL_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
RAMP_STEPS = 12
"""Each step moves chunks, and a chunk that moves is a miss: enough steps to be gradual."""


@dataclass(frozen=True)
class _Member:
    address: str
    instance: str
    heard_s: float
    joined_s: float
    ramps: bool


@dataclass(frozen=True)
class _Left:
    member: _Member
    left_s: float


@dataclass(frozen=True)
class Configured:
    """The settings of a store that change without a restart. Serve tells shards, and shards the directory."""

    replicas: int
    ramp_s: float


def share_at(age_s: float, ramp_s: float) -> float:
    """The share of its chunks, in (0, 1], that a shard gets ``age_s`` after it joined a running store empty.

    It grows by a step every ``ramp_s / RAMP_STEPS``, and is 1 from ``ramp_s`` on.
    """
    assert age_s >= 0
    if age_s >= ramp_s:
        return 1.0
    return (1 + int(RAMP_STEPS * age_s / ramp_s)) / (RAMP_STEPS + 1)


class Membership(ShardDirectory):
    """The shards that reported lately. For one thread."""

    def __init__(
        self,
        settling: bool = False,
        clock: Callable[[], float] = time.monotonic,
        ramp_s: float = 0.0,
        name: str = "",
        epoch: int = 0,
    ) -> None:
        """``settling``: some shards may not have reported yet, so give no map for one lease. ``name`` and
        ``epoch``: of the directory, in every map."""
        self.ramp_s = ramp_s
        """Seconds until a shard that joins empty is given all its chunks."""
        self._clock = clock
        self._settled_s = clock() + LEASE_S if settling else clock()
        self._members: dict[str, _Member] = {}
        self._left: dict[str, _Left] = {}
        """Shards that may come back; the last `SHARDS_MAX`."""
        self.replicas = 1
        """Shards that are to hold each chunk."""
        self._map = ShardMap(0, directory=name, epoch=epoch)

    def record_heartbeat(self, shard_id: str, address: str, instance: str, is_empty: bool = False) -> None:
        """Note that a shard is alive, and whether it holds nothing. ``instance`` names its process: another
        name means that the shard was restarted. Raises `ResourceExhausted` beyond `SHARDS_MAX` shards."""
        now_s = self._clock()
        known = self._members.get(shard_id)
        if known is None:
            if len(self._members) >= SHARDS_MAX:
                raise ResourceExhausted(f"{SHARDS_MAX} shards are there already")
            known = self._restore_member(shard_id, instance) or _Member(
                address, instance, now_s, now_s, is_empty and self._holds_chunks_of(shard_id, now_s)
            )
        elif known.instance != instance and is_empty and self._is_ramping(known, now_s):
            known = replace(known, joined_s=now_s)
        self._members[shard_id] = replace(known, address=address, instance=instance, heard_s=now_s)

    def _restore_member(self, shard_id: str, instance: str) -> _Member | None:
        """A member that merely did not report for a while and still holds its chunks; None: it restarted."""
        left = self._left.get(shard_id)
        if left is None or left.member.instance != instance:
            return None
        del self._left[shard_id]
        return left.member

    def _is_ramping(self, member: _Member, now_s: float) -> bool:
        return member.ramps and now_s - member.joined_s < self.ramp_s

    def _holds_chunks_of(self, shard_id: str, now_s: float) -> bool:
        """Whether other shards may hold the chunks that are about to move to this one.

        They do if some have been here for `ramp_s`, and this one has not, or left long ago, or left before it
        had all its chunks. Shards that start together, or restart, have nothing to take over.
        """
        if not any(now_s - member.joined_s >= self.ramp_s for member in self._members.values()):
            return False
        left = self._left.get(shard_id)
        if left is None or now_s - left.left_s >= self.ramp_s:
            return True
        return self._is_ramping(left.member, left.left_s)

    def remove_member(self, shard_id: str) -> None:
        """Remove a shard that is about to stop; unknown ones are ignored."""
        member = self._members.pop(shard_id, None)
        if member is None:
            return
        self._left.pop(shard_id, None)
        self._left[shard_id] = _Left(member, self._clock())
        if len(self._left) > SHARDS_MAX:
            del self._left[next(iter(self._left))]

    def current(self) -> ShardMap:
        now_s = self._clock()
        if now_s < self._settled_s:
            raise Unavailable("the directory has restarted and waits for shards to report; ask again")
        for name in [n for n, member in self._members.items() if now_s - member.heard_s > LEASE_S]:
            self.remove_member(name)
        members = sorted(self._members.items())
        shards = tuple(ShardAddress(name, member.address) for name, member in members)
        shares = tuple(
            share_at(now_s - member.joined_s, self.ramp_s) if member.ramps else 1.0 for _, member in members
        )
        if all(share == 1 for share in shares):
            shares = ()
        current = replace(self._map, shards=shards, replicas=self.replicas, shares=shares)
        if current != self._map:
            self._map = replace(current, version=current.version + 1)
        return self._map

    def close(self) -> None:
        return None


class DirectoryActor:
    """A Ray actor on one event loop: shards call it, clients reach it at `address`."""

    def __init__(self, store: dict[str, Any], name: str = "") -> None:
        """``name``: what the directory calls itself, in every life of the actor."""
        import ray

        spec = load(StoreSpec, store, "store")
        again = ray.get_runtime_context().was_current_actor_reconstructed
        # The default until a shard has been told: shards that start together are to find that they do.
        self._membership = Membership(
            settling=again, ramp_s=spec.ramp_s, name=name, epoch=int(time.time() * 1000)
        )
        self._listen = format_address(spec.host, spec.directory_port)
        self._tls = tls_of(spec)
        self._insecure = spec.insecure
        self._server: Any = None
        self._starting = asyncio.Lock()
        """Shards, engines and gateways of a new cluster ask at once."""

    async def start(self) -> str:
        """Listen, once; the address for clients of other hosts. Raises `Unavailable`, `InvalidField`."""
        async with self._starting:
            await self._start()
        return self.address()

    async def _start(self) -> None:
        if self._server is None:
            check_listen(self._listen, self._tls, self._insecure)
            server = grpc.aio.server(options=SERVER_OPTIONS)
            server.add_generic_rpc_handlers((DirectoryService(self._membership).generic_handler(),))
            try:
                if self._tls is None:
                    server.add_insecure_port(self._listen)
                else:
                    server.add_secure_port(self._listen, ServerTls(self._tls).credentials)
            except RuntimeError as error:
                raise Unavailable(
                    f"the directory cannot listen on {self._listen} ({error}); name another "
                    "store.directory_port"
                ) from error
            await server.start()
            self._server = server

    def address(self) -> str:
        """`host:port`, with this node's own address where it listens on all."""
        import ray

        return advertised_address(self._listen, ray.util.get_node_ip_address())

    async def heartbeat(
        self, shard_id: str, address: str, instance: str, is_empty: bool, configured: Configured | None
    ) -> None:
        """A shard is alive, and has been told this of the store; None: nothing yet."""
        await self.start()
        if configured is not None:
            self._membership.replicas = configured.replicas
            self._membership.ramp_s = configured.ramp_s
        self._membership.record_heartbeat(shard_id, address, instance, is_empty)

    async def leave(self, shard_id: str) -> None:
        self._membership.remove_member(shard_id)


def ensure_directory(store: dict[str, Any]) -> Any:
    """The actor, listening; made by the first who asks. Raises `Unavailable` where it does not start."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    actor = ray.remote(DirectoryActor).options(
        name=ACTOR_NAME,
        namespace=RAY_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
        # The head node's address is what clients of another cluster know.
        resources={"node:__internal_head__": 0.001},
    )
    # The cluster's own name: a directory that is made anew on it follows the one before.
    handle = actor.remote(store, ray.get_runtime_context().gcs_address)
    try:
        ray.get(handle.start.remote(), timeout=START_TIMEOUT_S)
    except RayTaskError as error:
        if isinstance(error.cause, KintsugiError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise Unavailable(f"the shard directory does not start: {error}") from error
    return handle


def remove_directory() -> None:
    """End the actor for good, once no shard is left; where there is none, nothing."""
    import ray

    with suppress(ValueError):
        ray.kill(ray.get_actor(ACTOR_NAME, namespace=RAY_NAMESPACE))


def reachable(store_url: str) -> str:
    """A store's URL with an address that can be connected to, where it names all of this cluster's."""
    import ray

    parts = urlsplit(store_url)
    if parts.scheme != "shards" or not is_wildcard(parts.hostname or ""):
        return store_url
    actor = ray.get_actor(ACTOR_NAME, namespace=RAY_NAMESPACE)
    address: str = ray.get(actor.address.remote(), timeout=CALL_TIMEOUT_S)
    return parts._replace(netloc=address).geturl()


def split_store_url(store_url: str) -> tuple[str, TlsFiles | None]:
    """A directory's `host:port` and the TLS files to reach it with, of a `shards://` URL. Raises
    `InvalidField`."""
    parts = urlsplit(store_url)
    if parts.scheme != "shards" or not parts.netloc:
        raise InvalidField("store_url", f"{store_url!r} must name a directory as shards://host:port")
    return parts.netloc, tls_files_of(parts.query)


class Announcer:
    """Tells the directory of one shard, from a thread, until `close`."""

    def __init__(
        self,
        store: dict[str, Any],
        shard_id: str,
        address: str,
        is_empty: Callable[[], bool],
        before_return: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns once the directory has heard of it. `before_return` is called whenever the shard has been
        out of the map for a while, before it is in it again. Raises `Unavailable`."""
        self._before_return = before_return
        self._store = store
        self._is_empty = is_empty
        self._shard_id = shard_id
        self._address = address
        self._instance = uuid.uuid4().hex
        self._configured: Configured | None = None
        self._closed = threading.Event()
        self._directory = ensure_directory(store)
        self._tell()
        self._thread = threading.Thread(target=self._run, name="kintsugi-announcer", daemon=True)
        self._thread.start()

    def configure(self, configured: Configured) -> None:
        self._configured = configured
        self._tell()

    def _tell(self) -> None:
        import ray

        told = self._directory.heartbeat.remote(
            self._shard_id, self._address, self._instance, self._is_empty(), self._configured
        )
        ray.get(told, timeout=CALL_TIMEOUT_S)
        self._told_s = time.monotonic()

    def _run(self) -> None:
        from ray.exceptions import RayError

        while not self._closed.wait(HEARTBEAT_S):
            try:
                if time.monotonic() - self._told_s > LEASE_S:
                    self._before_return()
                self._tell()
            except RayError as error:
                log.warning("the directory does not answer (%s); it is told again", error)
                # Ray starts a dead directory again behind the same handle; one that was removed is made anew.
                try:
                    self._directory = ensure_directory(self._store)
                except (RayError, KintsugiError) as missing:
                    log.warning("there is no directory (%s); it is looked for again", missing)

    def close(self) -> None:
        """Leave the map. Idempotent."""
        import ray
        from ray.exceptions import RayError

        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        try:
            ray.get(self._directory.leave.remote(self._shard_id), timeout=CALL_TIMEOUT_S)
        except RayError as error:
            log.warning("the directory was not told that this shard leaves (%s); it will notice", error)

"""The directory of a Ray cluster's live shards: one named actor. Shards report to it, and clients ask it over
gRPC.

Ray restarts a dead actor on the head node, where it listens on its old port. A restarted directory has no map
until every shard has had time to report: until then clients keep their map, since a new map would lack
shards.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import grpc

from kintsugi.core.deploy import RAMP_S, StoreSpec
from kintsugi.core.errors import InvalidField, KintsugiError, ResourceExhausted, Unavailable
from kintsugi.core.schema import load
from kintsugi.gateway.addresses import advertised_address, format_address, is_wildcard, tls_of
from kintsugi.store.client.directory import (
    DIRECTORY_SERVICE,
    SHARDS_MAX,
    ShardAddress,
    ShardDirectory,
    ShardMap,
    map_to_wire,
)
from kintsugi.store.client.options import tls_files_of
from kintsugi.store.client.registry import open_directory
from kintsugi.store.protocol.access import Access
from kintsugi.store.protocol.grpc_server import GrpcServer, build_handler
from kintsugi.store.protocol.grpc_status import abort_call
from kintsugi.store.protocol.tls import TlsFiles, check_listen

log = logging.getLogger(__name__)

ACTOR_NAME = "kintsugi-directory"
RAY_NAMESPACE = "kintsugi"
HEARTBEAT_S = 1.0
LEASE_S = 5.0
"""A shard that has not reported for this long leaves the map. Several heartbeats, since busy shards report
late."""
CALL_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
WATCH_POLL_S = 0.2
WATCH_BYTES_PER_S = 64 << 10
"""Maximum rate at which a watcher is sent maps."""
MESSAGE_BYTES_MAX = 4096
RAMP_STEPS = 12
"""Steps in which a new shard takes over its chunks. A chunk that moves is a miss, so the steps are small."""


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


def share_at(age_s: float, ramp_s: float) -> float:
    """Return the share of its chunks, in (0, 1], that a shard owns ``age_s`` after it joined a running store
    without chunks of its own.

    It grows by one step every ``ramp_s / RAMP_STEPS``, and is 1 from ``ramp_s`` on.
    """
    assert age_s >= 0
    if age_s >= ramp_s:
        return 1.0
    return (1 + int(RAMP_STEPS * age_s / ramp_s)) / (RAMP_STEPS + 1)


class Membership(ShardDirectory):
    """The shards that reported recently. Not thread-safe."""

    def __init__(
        self,
        settling: bool = False,
        clock: Callable[[], float] = time.monotonic,
        ramp_s: float = 0.0,
        name: str = "",
        epoch: int = 0,
    ) -> None:
        """``settling``: shards may exist that have not reported yet, so there is no map for `LEASE_S`.
        ``name`` and ``epoch`` identify the directory in every map."""
        self.ramp_s = ramp_s
        """Seconds until a shard that joins empty owns all its chunks."""
        self._clock = clock
        self._settled_s = clock() + LEASE_S if settling else clock()
        self._members: dict[str, _Member] = {}
        self._left: dict[str, _Left] = {}
        """Former members, which may return; the last `SHARDS_MAX`."""
        self.replicas = 1
        """Number of shards that hold each chunk."""
        self._map = ShardMap(0, directory=name, epoch=epoch)

    def record_heartbeat(self, shard_id: str, address: str, instance: str, is_empty: bool = False) -> None:
        """Record that a shard is alive. ``instance`` names its process: a new name means a restart.

        Raises `ResourceExhausted` beyond `SHARDS_MAX` shards."""
        now_s = self._clock()
        known = self._members.get(shard_id)
        if known is None:
            if len(self._members) >= SHARDS_MAX:
                raise ResourceExhausted(f"the directory already has {SHARDS_MAX} shards")
            known = self._restore_member(shard_id, instance) or _Member(
                address, instance, now_s, now_s, is_empty and self._holds_chunks_of(shard_id, now_s)
            )
        elif known.instance != instance and is_empty and self._is_ramping(known, now_s):
            known = replace(known, joined_s=now_s)
        self._members[shard_id] = replace(known, address=address, instance=instance, heard_s=now_s)

    def _restore_member(self, shard_id: str, instance: str) -> _Member | None:
        """Return the former member if the same process reports again, which still has its chunks; None if it
        restarted."""
        left = self._left.get(shard_id)
        if left is None or left.member.instance != instance:
            return None
        del self._left[shard_id]
        return left.member

    def _is_ramping(self, member: _Member, now_s: float) -> bool:
        return member.ramps and now_s - member.joined_s < self.ramp_s

    def _holds_chunks_of(self, shard_id: str, now_s: float) -> bool:
        """Whether other shards may hold the chunks that this shard will own.

        They may if some of them have been members for `ramp_s`, and this shard is new, left long ago, or left
        before it owned all its chunks. Shards that start together, or restart, take nothing over.
        """
        if not any(now_s - member.joined_s >= self.ramp_s for member in self._members.values()):
            return False
        left = self._left.get(shard_id)
        if left is None or now_s - left.left_s >= self.ramp_s:
            return True
        return self._is_ramping(left.member, left.left_s)

    def remove_member(self, shard_id: str) -> None:
        """Remove a shard that is about to stop. Unknown shards are ignored."""
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
            raise Unavailable("the directory has restarted and waits for shards to report; try again")
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


def pause_after(message: bytes) -> float:
    """Seconds for which a watcher gets no further map: a map of 1,000 shards is sent at most once a second,
    with all changes since the last one."""
    return len(message) / WATCH_BYTES_PER_S


class DirectoryService:
    """The gRPC service `ShardDirectory`."""

    def __init__(self, directory: ShardDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._map = ShardMap(-1)
        self._message = b""
        self._read_s = -math.inf

    def read_message(self) -> bytes:
        """Return the map as it is sent; the same object as long as the map is the same. It is read once per
        `WATCH_POLL_S` for all watchers: a map of 1,000 shards takes milliseconds. Raises `Unavailable`."""
        if self._clock() - self._read_s >= WATCH_POLL_S:
            current = self._directory.current()
            if current != self._map:
                self._map, self._message = current, map_to_wire(current).SerializeToString()
            self._read_s = self._clock()
        return self._message

    async def watch_shard_map(self, messages: AsyncIterator[bytes], context: Any) -> None:
        """Send the map whenever it changes, but a large one less often. The request is empty, and is not
        read."""
        sent = None
        while True:
            try:
                message = self.read_message()
            except KintsugiError as error:
                await abort_call(context, error)
            if message is not sent:
                await context.write(message)
                sent = message
                await asyncio.sleep(pause_after(message))
            await asyncio.sleep(WATCH_POLL_S)

    def generic_handler(self) -> Any:
        handlers = {"WatchShardMap": build_handler(self.watch_shard_map, bytes)}
        return grpc.method_handlers_generic_handler(DIRECTORY_SERVICE, handlers)


class DirectoryActor:
    """The directory as a Ray actor. Shards call it through Ray, clients over gRPC at `address`."""

    def __init__(self, store: dict[str, Any], name: str = "") -> None:
        """``name``: the directory's name, the same after every restart of the actor."""
        import ray

        spec = load(StoreSpec, store, "store")
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._membership = Membership(settling=again, ramp_s=RAMP_S, name=name, epoch=int(time.time() * 1000))
        self._listen = format_address(spec.expert.host, spec.expert.directory_port)
        self._tls = tls_of(spec)
        self._insecure = spec.expert.insecure
        self._server: GrpcServer | None = None
        self._starting = asyncio.Lock()
        """Shards, engines and gateways of a new cluster call `start` at the same time."""

    async def start(self) -> str:
        """Listen, if it does not yet. Returns the address for other hosts. Raises `Unavailable`,
        `InvalidField`."""
        async with self._starting:
            await self._start()
        return self.address()

    async def _start(self) -> None:
        if self._server is None:
            check_listen(self._listen, self._tls, self._insecure)
            server = GrpcServer(
                self._listen,
                self._tls,
                Access(),
                message_bytes_max=MESSAGE_BYTES_MAX,
                setting="store.expert.directory_port",
            )
            await server.start(DIRECTORY_SERVICE, DirectoryService(self._membership).generic_handler())
            for service in ("", DIRECTORY_SERVICE):
                await server.set_health(service, True)
            self._server = server

    def address(self) -> str:
        """Return `host:port`, with this node's address in place of a wildcard."""
        import ray

        return advertised_address(self._listen, ray.util.get_node_ip_address())

    async def heartbeat(
        self, shard_id: str, address: str, instance: str, is_empty: bool, replicas: int | None
    ) -> str:
        """Record that a shard is alive, and return the directory's own address. ``replicas``: how many shards
        are to hold each chunk; None: unknown."""
        await self.start()
        if replicas is not None:
            self._membership.replicas = replicas
        self._membership.record_heartbeat(shard_id, address, instance, is_empty)
        return self.address()

    async def leave(self, shard_id: str) -> None:
        self._membership.remove_member(shard_id)


def ensure_directory(store: dict[str, Any]) -> Any:
    """Return the listening actor. The first caller creates it. Raises `Unavailable` if it does not start."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    actor = ray.remote(DirectoryActor).options(
        name=ACTOR_NAME,
        namespace=RAY_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
        # On the head node, whose address clients of other clusters know.
        resources={"node:__internal_head__": 0.001},
    )
    # The name is the cluster's, so a new directory of this cluster counts as the former one's successor.
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
    """End the actor for good. Call it when no shard is left. Does nothing without an actor."""
    import ray

    with suppress(ValueError):
        ray.kill(ray.get_actor(ACTOR_NAME, namespace=RAY_NAMESPACE))


def reachable(store_url: str) -> str:
    """Return a store's URL, with the directory's address in place of a wildcard. Waits until a shard has
    created the directory. Raises `Unavailable` after `START_TIMEOUT_S`."""
    import ray

    parts = urlsplit(store_url)
    if parts.scheme != "shards" or not is_wildcard(parts.hostname or ""):
        return store_url
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            actor = ray.get_actor(ACTOR_NAME, namespace=RAY_NAMESPACE)
            break
        except ValueError:
            if time.monotonic() >= deadline_s:
                raise Unavailable(
                    f"no shard has created the directory within {START_TIMEOUT_S:.0f} s; see the shards' logs"
                ) from None
            time.sleep(WATCH_POLL_S)
    address: str = ray.get(actor.address.remote(), timeout=CALL_TIMEOUT_S)
    return parts._replace(netloc=address).geturl()


def split_store_url(store_url: str) -> tuple[str, TlsFiles | None]:
    """Return the directory's `host:port` and TLS files from a `shards://` URL. Raises `InvalidField`."""
    parts = urlsplit(store_url)
    if parts.scheme != "shards" or not parts.netloc:
        raise InvalidField("store_url", f"{store_url!r} must name a directory as shards://host:port")
    return parts.netloc, tls_files_of(parts.query)


class MovingDirectory(ShardDirectory):
    """The directory of a store's own cluster, whose address changes when another node becomes the head."""

    def __init__(self, store_url: str) -> None:
        """Raises `Unavailable` as `reachable`."""
        self._given, self._url = urlsplit(store_url), reachable(store_url)
        self._opened, self.options = open_directory(self._url)

    def move(self, address: str) -> None:
        """Follow the directory to its `host:port`."""
        url = self._given._replace(netloc=address).geturl()
        if url != self._url and is_wildcard(self._given.hostname or ""):
            former, self._url = self._opened, url
            self._opened, _ = open_directory(url)
            former.close()

    def current(self) -> ShardMap:
        return self._opened.current()

    def close(self) -> None:
        self._opened.close()


class Announcer:
    """Reports one shard to the directory, from a thread, until `close`."""

    def __init__(
        self,
        store: dict[str, Any],
        shard_id: str,
        address: str,
        is_empty: Callable[[], bool],
        before_return: Callable[[], None] = lambda: None,
        moved: Callable[[str], None] = lambda address: None,
    ) -> None:
        """Returns after the first heartbeat. `before_return` is called before a shard that had left the map
        enters it again, `moved` with the directory's address after each heartbeat. Raises `Unavailable`."""
        self._before_return = before_return
        self._moved = moved
        self._store = store
        self._is_empty = is_empty
        self._shard_id = shard_id
        self._address = address
        self._instance = uuid.uuid4().hex
        self._replicas: int | None = None
        self._closed = threading.Event()
        self._directory = ensure_directory(store)
        self._report()
        self._thread = threading.Thread(target=self._run, name="kintsugi-announcer", daemon=True)
        self._thread.start()

    def configure(self, replicas: int) -> None:
        """Tell the directory how many shards are to hold each chunk."""
        self._replicas = replicas
        self._report()

    def _report(self) -> None:
        import ray

        heartbeat = self._directory.heartbeat.remote(
            self._shard_id, self._address, self._instance, self._is_empty(), self._replicas
        )
        self._moved(ray.get(heartbeat, timeout=CALL_TIMEOUT_S))
        self._reported_s = time.monotonic()

    def _run(self) -> None:
        from ray.exceptions import RayError

        while not self._closed.wait(HEARTBEAT_S):
            try:
                if time.monotonic() - self._reported_s > LEASE_S:
                    self._before_return()
                self._report()
            except RayError as error:
                log.warning("the directory does not answer (%s); the heartbeat is repeated", error)
                # Ray restarts a dead directory behind the same handle. A removed one is created anew.
                try:
                    self._directory = ensure_directory(self._store)
                except (RayError, KintsugiError) as missing:
                    log.warning("there is no directory (%s); the next heartbeat tries again", missing)

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
            log.warning(
                "the directory did not confirm that this shard leaves (%s); its lease will expire", error
            )

"""What an operator asks of one shard, beside what every store can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.layout import ChunkManifest
from kintsugi.core.spaces import ChunkKey
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.protocol import wire

VERIFY_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ListedChunk:
    """A chunk and the fastest tier that holds it."""

    manifest: ChunkManifest
    tier: str


@dataclass(frozen=True)
class Verified:
    """What `verify` found."""

    intact: int
    absent: int
    quarantined: tuple[ChunkKey, ...]


class ShardAdmin:
    """Calls that raise what `GrpcStore` raises."""

    def __init__(self, store: GrpcStore) -> None:
        self.store = store

    def stats(self) -> pb.StatsResponse:
        """Everything the shard counts."""
        stats: pb.StatsResponse = self.store.call("Stats", pb.StatsRequest(), pb.StatsResponse)
        return stats

    def list(self, namespace: str, limit: int, after: ChunkKey | None = None) -> list[ListedChunk]:
        """The first `limit` chunks behind `after`, in key order: fewer only where there are no more."""
        chunks: list[ListedChunk] = []
        last = after.digest if after else None
        while len(chunks) < limit:
            request = pb.ListRequest(namespace=namespace, limit=limit - len(chunks), after=last)
            found = self.store.call("List", request, pb.ListResponse).found
            if not found:
                break
            last = found[-1].manifest.key
            readable = [(wire.readable_manifest(entry.manifest), entry.tier) for entry in found]
            chunks += [ListedChunk(manifest, tier) for manifest, tier in readable if manifest is not None]
        return chunks

    def clear(self, namespace: str) -> int:
        """Forget a namespace's chunks; their number."""
        return int(self.store.call("Clear", pb.ClearRequest(namespace=namespace), pb.ClearResponse).deleted)

    def verify(self, namespace: str, keys: Sequence[ChunkKey]) -> Verified:
        """Have the shard read chunks from every tier and quarantine what is damaged."""
        request = pb.VerifyRequest(namespace=namespace, keys=[key.digest for key in keys])
        response = self.store.call("Verify", request, pb.VerifyResponse, VERIFY_TIMEOUT_S)
        quarantined = tuple(ChunkKey(key) for key in response.quarantined)
        return Verified(response.intact, response.absent, quarantined)

    def drain(self, timeout_s: float) -> int:
        """Refuse puts and write everything back; the bytes that were not written in time."""
        request = pb.DrainRequest(timeout_s=timeout_s)
        return int(self.store.call("Drain", request, pb.DrainResponse, timeout_s + 5.0).bytes_left)

"""Calls to one shard for its operator, beyond those that every store has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.spaces import ChunkKey
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.grpc_store import GrpcStore

VERIFY_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Verified:
    """The result of `verify`."""

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

    def clear(self, namespace: str) -> int:
        """Delete a namespace's chunks and return their number."""
        return int(self.store.call("Clear", pb.ClearRequest(namespace=namespace), pb.ClearResponse).deleted)

    def verify(self, namespace: str, keys: Sequence[ChunkKey]) -> Verified:
        """Have the shard read chunks from every tier and quarantine what is damaged."""
        request = pb.VerifyRequest(namespace=namespace, keys=[key.digest for key in keys])
        response = self.store.call("Verify", request, pb.VerifyResponse, VERIFY_TIMEOUT_S)
        quarantined = tuple(ChunkKey(key) for key in response.quarantined)
        return Verified(response.intact, response.absent, quarantined)

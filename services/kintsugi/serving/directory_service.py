"""The gRPC service `ShardDirectory` over a directory in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kintsugi.core.errors import KintsugiError
from kintsugi.rpc.v1 import directory_pb2 as pb
from kintsugi.store.client.directory import DIRECTORY_SERVICE, ShardDirectory, map_to_wire
from kintsugi.store.protocol.grpc_status import status_of

POLL_S = 0.2


class DirectoryService:
    """Answers with the directory's map."""

    def __init__(self, directory: ShardDirectory) -> None:
        self._directory = directory

    async def get_shard_map(self, request: Any, context: Any) -> pb.ShardMap:
        try:
            return map_to_wire(self._directory.current())
        except KintsugiError as error:
            await context.abort(status_of(error), str(error))
            raise

    async def watch_shard_map(
        self, request: pb.WatchShardMapRequest, context: Any
    ) -> AsyncIterator[pb.ShardMap]:
        sent = None
        while True:
            current = await self.get_shard_map(request, context)
            if current != sent:
                yield current
                sent = current
            await asyncio.sleep(POLL_S)

    def generic_handler(self) -> Any:
        handlers = {
            "GetShardMap": grpc.unary_unary_rpc_method_handler(
                self.get_shard_map, pb.GetShardMapRequest.FromString, pb.ShardMap.SerializeToString
            ),
            "WatchShardMap": grpc.unary_stream_rpc_method_handler(
                self.watch_shard_map, pb.WatchShardMapRequest.FromString, pb.ShardMap.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(DIRECTORY_SERVICE, handlers)

"""Serve's request router for engines, around the decisions of `serving.routing`.

Serve sends this module by value to every process with a handle. That process imports `serving.routing`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter

from kintsugi.core.errors import KintsugiError
from kintsugi.core.exchange import EngineRequest, OpenAICall
from kintsugi.serving.directory import reachable, split_store_url
from kintsugi.serving.routing import (
    EngineView,
    PrefixMemory,
    Wanted,
    estimate_wanted,
    prefix_digests,
    rank_engines,
    tokens_by_host,
)
from kintsugi.store.client.directory import GrpcDirectory

log = logging.getLogger(__name__)


class Sent:
    """The load of one engine: its last report, and the unanswered tokens sent to it since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = 0
        self._clock = clock
        self._report: Mapping[str, Any] = {}
        self._reported_s = 0.0
        self._by_request: dict[str, int] = {}

    def take_report(self, report: Mapping[str, Any]) -> None:
        """Count sent tokens from zero after a new report, which includes them."""
        if report != self._report:
            self._report, self._reported_s, self.tokens = report, self._clock(), 0
            self._by_request.clear()

    def waiting_tokens(self) -> int:
        """Return the number of prompt tokens that wait. Between two reports, the engine is assumed to work at
        its reported rate."""
        age_s = self._clock() - self._reported_s
        answered = age_s * float(self._report.get("tokens_per_s", 0.0))
        return max(0, int(self._report.get("waiting_tokens", 0) - answered)) + self.tokens

    def add(self, request_id: str, num_tokens: int) -> None:
        self._by_request[request_id] = num_tokens
        self.tokens += num_tokens

    def remove(self, request_id: str) -> None:
        self.tokens -= self._by_request.pop(request_id, 0)


class EngineRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Ranks all replicas for one handle. Serve takes the next replica if one is full."""

    def initialize_state(self, store_url: str = "") -> None:
        """With a ``store_url`` of shards, an engine on the host of a request's chunks is preferred."""
        self._memory = PrefixMemory()
        self._sent: dict[str, Sent] = {}
        self._directory: GrpcDirectory | None = None
        self._opening = asyncio.ensure_future(self._open_directory(store_url)) if store_url else None

    async def _open_directory(self, store_url: str) -> None:
        """Open the directory in a thread. Until the first map, all hosts count as equal."""
        try:
            address, tls = split_store_url(await asyncio.to_thread(reachable, store_url))
            directory = GrpcDirectory(address, tls)
            await asyncio.to_thread(directory.current)
            self._directory = directory
        except KintsugiError as error:
            log.warning("routing ignores where chunks are: %s", error)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> Sequence[list[Any]]:
        """Give each replica its own rank, the best first."""
        if pending_request is None:
            return [candidate_replicas]
        # Otherwise Serve retries without a delay while all replicas are full.
        pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        views = {name: self._view(name, replica) for name, replica in replicas.items()}
        wanted = self._memoize_wanted(pending_request)
        order = rank_engines(views, wanted, self._memory)
        return [[replicas[name]] for name in order]

    def _view(self, name: str, replica: Any) -> EngineView:
        """Return the replica's state, from its report and the tokens sent to it since."""
        report = replica.routing_stats
        sent = self._sent.setdefault(name, Sent())
        sent.take_report(report)
        return EngineView(
            sent.waiting_tokens(),
            float(report.get("tokens_per_s", 0.0)),
            str(report.get("host", "")),
            str(report.get("fingerprint", "")),
        )

    def _memoize_wanted(self, pending_request: PendingRequest) -> Wanted:
        """Return the needs of a call, derived only once."""
        kept = vars(pending_request)
        if "kintsugi_wanted" not in kept:
            kept["kintsugi_wanted"] = self._derive_wanted(pending_request)
        wanted: Wanted = kept["kintsugi_wanted"]
        return wanted

    def _derive_wanted(self, pending_request: PendingRequest) -> Wanted:
        """Return the needs of a call; none for calls such as `info`."""
        for argument in pending_request.args:
            if isinstance(argument, EngineRequest):
                ids, params = argument.prompt_token_ids, argument.params
                chunks: dict[str, int] = {}
                if self._directory is not None and params.spans:
                    chunks = tokens_by_host(params.spans, self._directory.current())
                prefix = prefix_digests(params.namespace, ids)
                return Wanted(len(ids), prefix, chunks, argument.fingerprint)
            if isinstance(argument, OpenAICall):
                return estimate_wanted(argument)
        return Wanted(0)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        wanted = self._memoize_wanted(pending_request)
        self._memory.record_route(wanted.prefix, replica_id.unique_id)
        sent = self._sent.setdefault(replica_id.unique_id, Sent())
        sent.add(pending_request.metadata.internal_request_id, wanted.num_tokens)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Stop counting a request that has ended, since the next report may be a second away."""
        if replica_id.unique_id in self._sent:
            self._sent[replica_id.unique_id].remove(internal_request_id)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._memory.forget(replica_id.unique_id)
        self._sent.pop(replica_id.unique_id, None)

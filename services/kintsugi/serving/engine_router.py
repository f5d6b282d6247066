"""Serve's request router for engines: what `serving.routing` decides, in Serve's terms.

Serve sends this module to every holder of a handle by value; what it decides with is imported there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter

from kintsugi.core.exchange import EngineRequest
from kintsugi.serving.routing import EngineView, PrefixMemory, RouteCosts, Wanted, prefix_digests, ranked


class Sent:
    """Tokens that went to an engine since it reported last."""

    def __init__(self) -> None:
        self.report: Any = None
        self.tokens = 0


class EngineRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """For one handle. Ranks all replicas; Serve goes down the list where one is full."""

    def initialize_state(self, **kwargs: Any) -> None:
        """``kwargs``: `RouteCosts`, by name."""
        self._costs = RouteCosts(**kwargs)
        self._memory = PrefixMemory()
        self._sent: dict[str, Sent] = {}

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> Sequence[list[Any]]:
        """Each replica a rank of its own, the best first."""
        if pending_request is None:
            return [candidate_replicas]
        # Without it Serve asks again at once where all are full.
        pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        views = {name: self._view(name, replica) for name, replica in replicas.items()}
        order = ranked(views, wanted_of(pending_request), self._memory, self._costs)
        return [[replicas[name]] for name in order]

    def _view(self, name: str, replica: Any) -> EngineView:
        """What the replica reported, and what was sent there since."""
        report = replica.routing_stats
        sent = self._sent.setdefault(name, Sent())
        if sent.report != report:
            sent.report, sent.tokens = report, 0
        return EngineView(
            int(report.get("waiting_tokens", 0)) + sent.tokens,
            float(report.get("tokens_per_s", 0.0)),
            str(report.get("host", "")),
        )

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        wanted = wanted_of(pending_request)
        self._memory.routed(wanted.prefix, replica_id.unique_id)
        self._sent.setdefault(replica_id.unique_id, Sent()).tokens += wanted.num_tokens

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._memory.forget(replica_id.unique_id)
        self._sent.pop(replica_id.unique_id, None)


def wanted_of(pending_request: PendingRequest) -> Wanted:
    """Of a call whose first argument is an `EngineRequest`; nothing of another."""
    for argument in pending_request.args:
        if isinstance(argument, EngineRequest):
            ids = argument.prompt_token_ids
            return Wanted(len(ids), prefix_digests(argument.params.namespace, ids))
    return Wanted(0)

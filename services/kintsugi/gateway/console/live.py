"""The service as it is now, for the console: shards and tiers, queues, and what tenants use."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from kintsugi.core.errors import KintsugiError
from kintsugi.gateway.gateway import Gateway
from kintsugi.store.protocol.callers import Caller
from kintsugi.store.protocol.interface import StoreStats

TENANTS_MAX = 100
"""Tenants that are listed: those with most tokens."""

_REQUESTS = ("kintsugi_gateway_requests_total", "kintsugi_http_requests_total")
_FILL_QUEUE = "kintsugi_gateway_fill_queue_chunks"


class LiveService:
    """Describes one gateway's service. For one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def describe(self, caller: Caller) -> dict[str, Any]:
        """JSON form. Tenants are those that the caller may use."""
        stats = await self._stats()
        return {
            "at_unix_s": time.time(),
            "store": _describe_store(stats),
            "gateway": {
                "answers_under_way": self._gateway.answers.under_way,
                "known_chunks": len(self._gateway.known),
                "tokens_discovered": self._gateway.answers.tally.tokens_discovered,
                **self._counts(),
            },
            "tenants": self._tenants(caller),
        }

    async def _stats(self) -> StoreStats | KintsugiError:
        try:
            return await self._gateway.recent_stats.get()
        except KintsugiError as error:
            return error

    def _counts(self) -> dict[str, float]:
        """Sums of the gateway's own metrics."""
        sums = {"tokens_hit": 0.0, "tokens_missed": 0.0, "requests": 0.0, "fill_queue_chunks": 0.0}
        for family in self._gateway.metrics.registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_chunk_tokens_total"):
                    sums[f"tokens_{sample.labels['result']}"] += sample.value
                elif sample.name in _REQUESTS and not sample.labels.get("path", "").startswith("/console"):
                    sums["requests"] += sample.value
                elif sample.name == _FILL_QUEUE:
                    sums["fill_queue_chunks"] = sample.value
        return sums

    def _tenants(self, caller: Caller) -> list[dict[str, Any]]:
        accounts = [one for one in self._gateway.shares.accounts if caller.may_use(one.name)]
        accounts.sort(key=lambda account: (-account.tokens_charged, account.name))
        return [
            {
                "name": account.name,
                "in_flight": account.in_flight,
                "queued": len(account.waiting),
                "requests": account.requests_total,
                "tokens": max(0, account.tokens_charged),
                "refused": sum(account.refused_total.values()),
            }
            for account in accounts[:TENANTS_MAX]
        ]


def _describe_store(stats: StoreStats | KintsugiError) -> dict[str, Any]:
    if isinstance(stats, KintsugiError):
        return {"problem": str(stats), "shards": []}
    return {
        "problem": "",
        "chunks": stats.chunks,
        "bytes_used": stats.bytes_used,
        "bytes_capacity": stats.bytes_capacity,
        "transport": stats.transport,
        "shards": [dataclasses.asdict(shard) for shard in stats.shards],
    }

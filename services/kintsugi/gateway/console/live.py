"""The present state of the service, for the console: shards and tiers, queues, and the use of each tenant."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from kintsugi.core.errors import KintsugiError
from kintsugi.gateway.gateway import Gateway
from kintsugi.store.protocol.callers import Caller

TENANTS_MAX = 100
"""Maximum number of listed tenants; those with most tokens come first."""

_REQUESTS = ("kintsugi_gateway_requests_total", "kintsugi_http_requests_total")
_FILL_QUEUE = "kintsugi_gateway_fill_queue_chunks"


async def describe_live(gateway: Gateway, caller: Caller) -> dict[str, Any]:
    """Describe the service as JSON, with the tenants that the caller may use."""
    return {
        "at_unix_s": time.time(),
        "store": await _describe_store(gateway),
        "gateway": {
            "answers_under_way": gateway.answers.under_way,
            "known_chunks": len(gateway.known),
            "tokens_discovered": gateway.answers.tally.tokens_discovered,
            **_count(gateway),
        },
        "tenants": _describe_tenants(gateway, caller),
    }


def _count(gateway: Gateway) -> dict[str, float]:
    """Return sums of the gateway's own metrics."""
    sums = {"tokens_hit": 0.0, "tokens_missed": 0.0, "requests": 0.0, "fill_queue_chunks": 0.0}
    for family in gateway.metrics.registry.collect():
        for sample in family.samples:
            if sample.name.endswith("_chunk_tokens_total"):
                sums[f"tokens_{sample.labels['result']}"] += sample.value
            elif sample.name in _REQUESTS and not sample.labels.get("path", "").startswith("/console"):
                sums["requests"] += sample.value
            elif sample.name == _FILL_QUEUE:
                sums["fill_queue_chunks"] = sample.value
    return sums


def _describe_tenants(gateway: Gateway, caller: Caller) -> list[dict[str, Any]]:
    accounts = [one for one in gateway.shares.accounts if caller.may_use(one.name)]
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


async def _describe_store(gateway: Gateway) -> dict[str, Any]:
    try:
        stats = await gateway.recent_stats.get()
    except KintsugiError as error:
        return {"problem": str(error), "shards": []}
    return {
        "problem": "",
        "chunks": stats.chunks,
        "bytes_used": stats.bytes_used,
        "bytes_capacity": stats.bytes_capacity,
        "transport": stats.transport,
        "shards": [dataclasses.asdict(shard) for shard in stats.shards],
    }

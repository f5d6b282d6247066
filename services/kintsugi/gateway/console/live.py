"""The present state of the service, for the console: shards and tiers, queues, and the use of each tenant."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from kintsugi.core.errors import KintsugiError
from kintsugi.gateway.gateway import Gateway
from kintsugi.store.protocol.access import Caller

TENANTS_MAX = 100
"""Maximum number of listed tenants; those with most tokens come first."""


async def describe_live(gateway: Gateway, caller: Caller) -> dict[str, Any]:
    """Describe the service as JSON, with the tenants that the caller may use."""
    tally = gateway.answers.tally
    return {
        "at_unix_s": time.time(),
        "store": await _describe_store(gateway),
        "gateway": {
            "answers": tally.answers,
            "answers_under_way": gateway.answers.under_way,
            "known_chunks": len(gateway.known),
            "fill_queue_chunks": gateway.fill_queue_chunks,
            "tokens_hit": tally.tokens_hit,
            "tokens_missed": tally.tokens_missed,
            "tokens_discovered": tally.tokens_discovered,
        },
        "tenants": _describe_tenants(gateway, caller),
    }


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

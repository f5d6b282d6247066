"""Reads the metrics of pods: bytes in the shards' tiers and the engines' hit rate."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kintsugi_operator.api.status import TierStatus
from kintsugi_operator.observed.views import Figures

TIMEOUT_S = 2.0
BYTES_MAX = 2 << 20
AT_ONCE_MAX = 16
GRAIN_BYTES = 1 << 26
"""Step of the byte counts in a status: small changes cause no write."""
TIER_USED = "kintsugi_store_tier_used_bytes"
TIER_CAPACITY = "kintsugi_store_tier_capacity_bytes"
HIT = "kintsugi_blend_tokens_hit_total"
MISSED = "kintsugi_blend_tokens_missed_total"


class Web:
    """A client for the HTTP pages of pods."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._places = asyncio.Semaphore(AT_ONCE_MAX)

    async def fetch(self, url: str) -> str:
        """Return the page; empty after an error or a timeout, and for a page larger than `BYTES_MAX`."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._places, self._session.get(url, timeout=timeout) as answer:
                if answer.status != 200:
                    return ""
                page = await answer.content.read(BYTES_MAX)
                return page.decode(errors="replace") if answer.content.at_eof() else ""
        except (aiohttp.ClientError, OSError, TimeoutError):
            return ""

    async def fetch_all(self, urls: Iterable[str]) -> list[str]:
        """Fetch the pages concurrently, at most `AT_ONCE_MAX` at once. Returns them in order."""
        return list(await asyncio.gather(*map(self.fetch, urls)))


def figures(shards: Sequence[str], engines: Sequence[str]) -> Figures:
    """Compute the figures from the metrics pages of shards and engines."""
    used, total = _sum_by_tier(shards, TIER_USED), _sum_by_tier(shards, TIER_CAPACITY)
    hit, missed = (sum(sample.value for sample in _samples(engines, name)) for name in (HIT, MISSED))
    tiers = tuple(
        TierStatus(name, int(used[name] // GRAIN_BYTES) * GRAIN_BYTES, int(total[name]))
        for name in sorted(total)
    )
    return Figures(tiers, round(hit / (hit + missed), 2) if hit + missed else None)


def _sum_by_tier(pages: Sequence[str], name: str) -> dict[str, float]:
    amounts: dict[str, float] = defaultdict(float)
    for sample in _samples(pages, name):
        amounts[sample.labels.get("tier", "")] += sample.value
    return amounts


def _samples(pages: Sequence[str], name: str) -> Iterator[Sample]:
    """Samples of one metric in pages of Prometheus' text format. A page with a malformed sample counts as
    empty.

    Parses only the metric's lines: an engine's page has thousands, and parsing blocks the event loop.
    """
    for page in pages:
        lines = [line for line in page.splitlines() if line.startswith(name)]
        with suppress(ValueError):
            families = list(text_string_to_metric_families("\n".join(lines)))
            yield from (sample for family in families for sample in family.samples if sample.name == name)

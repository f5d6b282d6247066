"""What metrics and logs say: shards' bytes by tier, engines' hit rate, a corpus job's report."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence

import aiohttp

from kintsugi_operator.api.status import TierStatus
from kintsugi_operator.observed.views import Figures

TIMEOUT_S = 2.0
BYTES_MAX = 2 << 20
AT_ONCE_MAX = 16
GRAIN_BYTES = 1 << 26
"""Bytes in a status change in steps of this, so that an idle service is not written to."""

_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")
_TIER = re.compile(r'tier="([^"]*)"')


class Web(ABC):
    """Pages of pods."""

    @abstractmethod
    async def fetch(self, url: str) -> str:
        """The page; empty where nobody answers in time, or with more than `BYTES_MAX`."""


class HttpWeb(Web):
    """Over HTTP."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._places = asyncio.Semaphore(AT_ONCE_MAX)

    async def fetch(self, url: str) -> str:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._places, self._session.get(url, timeout=timeout) as answer:
                if answer.status != 200:
                    return ""
                page = await answer.content.read(BYTES_MAX)
                return page.decode(errors="replace") if answer.content.at_eof() else ""
        except (aiohttp.ClientError, OSError, TimeoutError):
            return ""


async def fetch_all(web: Web, urls: Iterable[str]) -> list[str]:
    """All at once, in order."""
    return list(await asyncio.gather(*(web.fetch(url) for url in urls)))


def figures(shards: Sequence[str], engines: Sequence[str]) -> Figures:
    """From the pages of shards and engines."""
    used: dict[str, float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    for name, labels, value in _samples(shards):
        tier = _TIER.search(labels)
        if tier is not None and name == "kintsugi_store_tier_used_bytes":
            used[tier[1]] += value
        elif tier is not None and name == "kintsugi_store_tier_capacity_bytes":
            total[tier[1]] += value
    hit = missed = 0.0
    for name, _, value in _samples(engines):
        if name == "kintsugi_blend_tokens_hit_total":
            hit += value
        elif name == "kintsugi_blend_tokens_missed_total":
            missed += value
    tiers = tuple(TierStatus(name, _coarse(used[name]), int(total[name])) for name in sorted(total))
    return Figures(tiers, round(hit / (hit + missed), 2) if hit + missed else None)


def _coarse(value: float) -> int:
    return int(value // GRAIN_BYTES) * GRAIN_BYTES


def _samples(pages: Sequence[str]) -> Iterable[tuple[str, str, float]]:
    """Name, labels and value of each sample in the Prometheus text format; what is none is passed over."""
    for page in pages:
        for line in page.splitlines():
            match = _SAMPLE.match(line)
            if match is None:
                continue
            try:
                yield match["name"], match["labels"] or "", float(match["value"])
            except ValueError:
                continue

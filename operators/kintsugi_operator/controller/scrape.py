"""Reads pages of pods: the logs of jobs from their clusters' dashboards, and an engine's metrics."""

from __future__ import annotations

import aiohttp

TIMEOUT_S = 2.0
BYTES_MAX = 2 << 20


class Web:
    """A client for the HTTP pages of pods."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def fetch(self, url: str) -> str:
        """Return the page; empty after an error or a timeout, and for a page larger than `BYTES_MAX`."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.get(url, timeout=timeout) as answer:
                if answer.status != 200:
                    return ""
                page = await answer.content.read(BYTES_MAX)
                return page.decode(errors="replace") if answer.content.at_eof() else ""
        except (aiohttp.ClientError, OSError, TimeoutError):
            return ""

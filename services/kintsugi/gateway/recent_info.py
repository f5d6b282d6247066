"""Answers that many requests need, cached for a short time: the engines' descriptions and the store's
stats."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Generic, TypeVar

from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi.core.exchange import EngineInfo
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint

log = logging.getLogger(__name__)

RECENT_S = 1.0
"""Default maximum age of a cached answer, and maximum age of a cached error."""
ANSWER_S = 5.0
"""Maximum time until an answer arrives."""
INFO_TTL_S = 5.0
"""Age at which an engine's description is renewed, so that a passed calibration takes effect soon."""
SPACES_MAX = 1024

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """A cached answer. Concurrent callers share one request for it. For one event loop."""

    def __init__(self, ask: Callable[[], Awaitable[Value]], silence: str) -> None:
        """``silence``: the error message, without the time, if no answer arrives within `ANSWER_S`."""
        self._ask = ask
        self._silence = silence
        self._last: Value | KintsugiError = Unavailable("no answer was requested yet")
        self._last_s = float("-inf")
        self.known: Value | None = None
        """The newest answer, whatever its age; None before the first."""
        self._asking: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def get(self, age_s_max: float | None = None) -> Value:
        """Return an answer at most ``age_s_max`` old; None: `RECENT_S`.

        Raises the error of the last request up to the same age, but at most `RECENT_S`, and `Unavailable` if
        no answer arrives within `ANSWER_S`.
        """
        if self._is_due(age_s_max):
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._renew())
            await asyncio.shield(self._asking)  # other callers wait for it, too
        if isinstance(self._last, KintsugiError):
            raise self._last.with_traceback(None)  # the traceback would grow with every caller
        return self._last

    def _is_due(self, age_s_max: float | None) -> bool:
        believed_s = RECENT_S if age_s_max is None else age_s_max
        if isinstance(self._last, KintsugiError):
            believed_s = min(believed_s, RECENT_S)
        return time.monotonic() - self._last_s >= believed_s

    async def _renew(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                self._last = self.known = await self._ask()
        except KintsugiError as error:
            self._last = error
        except TimeoutError:
            self._last = Unavailable(f"{self._silence} within {ANSWER_S:.0f} s")
        self._last_s = time.monotonic()

    async def get_stale(self, age_s_max: float) -> Value:
        """Return the newest answer, whatever has failed since. An answer older than ``age_s_max`` is renewed
        in the background, so that an engine that hangs does not delay requests. Before the first answer: as
        `get`."""
        if self.known is None:
            return await self.get(0.0)
        if self._is_due(age_s_max) and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renew_beside(age_s_max))
        return self.known

    async def _renew_beside(self, age_s_max: float) -> None:
        try:
            await self.get(age_s_max)
        except KintsugiError as error:
            log.warning("%s: the last answer is used: %s", self._silence, error)
        except Exception:
            log.exception("%s: the last answer is used", self._silence)

    async def close(self) -> None:
        """Idempotent."""
        tasks = [task for task in (self._renewing, self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Spaces:
    """The chunk spaces of the model that the engines serve. For one event loop."""

    def __init__(
        self,
        recent_info: Recent[EngineInfo],
        tokenizer: str = "",
        name_key: Callable[[str], bytes] = lambda namespace: b"",
    ) -> None:
        """``tokenizer``: digest of the gateway's tokenizer; engines with another one are ignored. Empty:
        every engine is accepted. ``name_key``: `ChunkStore.name_key`."""
        self._name_key = name_key
        self._recent_info = recent_info
        self._tokenizer = tokenizer
        self._own_info: EngineInfo | None = None

    @property
    def known_info(self) -> EngineInfo | None:
        """The newest description of an engine; None before an engine has answered."""
        return self._recent_info.known

    async def info(self) -> EngineInfo:
        """Return the newest description of an engine with the gateway's tokenizer: during a change of models,
        engines of both models answer. Raises `Unavailable` before the first such answer."""
        info = await self._recent_info.get_stale(INFO_TTL_S)
        if not self._tokenizer or info.tokenizer in ("", self._tokenizer):
            self._own_info = info
        if self._own_info is None:
            raise Unavailable("only engines of another model have answered so far; try again later")
        return self._own_info

    async def find(self, namespace: str) -> ChunkSpace:
        """Return the namespace's chunk space. Raises `Unavailable`."""
        info = await self.info()
        context = tuple(info.context_token_ids)
        return _make_space(
            info.fingerprint,
            namespace,
            tuple(info.prefix_token_ids),
            info.portable,
            context,
            self._name_key(namespace),
        )


@lru_cache(SPACES_MAX)
def _make_space(
    fingerprint: str,
    namespace: str,
    prefix_token_ids: tuple[int, ...],
    portable: bool,
    context_token_ids: tuple[int, ...],
    name_key: bytes,
) -> ChunkSpace:
    model = ModelFingerprint(bytes.fromhex(fingerprint))
    return ChunkSpace(model, namespace, prefix_token_ids, portable, context_token_ids, name_key)

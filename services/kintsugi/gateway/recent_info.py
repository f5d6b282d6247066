"""What many ask for, kept for a moment: the engines' description of themselves, and what the store holds."""

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
ANSWER_S = 5.0
INFO_TTL_S = 5.0
"""An engine's description is renewed when it is older: a calibration that passes is seen soon after."""
SPACES_MAX = 1024

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """An answer, kept for a while. For one event loop. However many callers there are, it is asked for once
    at a time, and by default once in `RECENT_S`."""

    def __init__(self, ask: Callable[[], Awaitable[Value]], silence: str) -> None:
        """``silence``: what to say if none comes within `ANSWER_S`: `no engine answered`."""
        self._ask = ask
        self._silence = silence
        self._last: Value | KintsugiError = Unavailable("nobody was asked yet")
        self._last_s = float("-inf")
        self._known: Value | None = None
        self._asking: asyncio.Task[None] | None = None

    @property
    def known(self) -> Value | None:
        """The newest answer, however old; None before the first."""
        return self._known

    async def get(self, age_s_max: float | None = None) -> Value:
        """An answer at most ``age_s_max`` old; None: `RECENT_S`. Raises what asking raised, for that time but
        no longer than `RECENT_S`, and `Unavailable` if there was no answer within `ANSWER_S`."""
        if self._is_due(age_s_max):
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._renew())
            await asyncio.shield(self._asking)  # others wait for it even if one caller leaves
        if isinstance(self._last, KintsugiError):
            raise self._last.with_traceback(None)  # which would grow with every caller
        return self._last

    def _is_due(self, age_s_max: float | None) -> bool:
        believed_s = RECENT_S if age_s_max is None else age_s_max
        if isinstance(self._last, KintsugiError):
            believed_s = min(believed_s, RECENT_S)
        return time.monotonic() - self._last_s >= believed_s

    async def _renew(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                self._last = self._known = await self._ask()
        except KintsugiError as error:
            self._last = error
        except TimeoutError:
            self._last = Unavailable(f"{self._silence} within {ANSWER_S:.0f} s")
        self._last_s = time.monotonic()

    async def close(self) -> None:
        """Idempotent."""
        await _end(self._asking)


class RecentInfo(Recent[EngineInfo]):
    """An engine's description of itself."""

    def __init__(self, ask: Callable[[], Awaitable[EngineInfo]]) -> None:
        super().__init__(ask, "no engine answered")
        self._renewing: asyncio.Task[None] | None = None

    async def get_stale(self, age_s_max: float) -> EngineInfo:
        """The newest description, whatever has failed since. If it is older than ``age_s_max``, it is renewed
        in the background: an engine that hangs must not delay requests that can be answered. Raises what
        `get` raises if no engine has answered yet."""
        if self._known is None:
            return await self.get(0.0)
        if self._is_due(age_s_max) and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renew_beside(age_s_max))
        return self._known

    async def _renew_beside(self, age_s_max: float) -> None:
        try:
            await self.get(age_s_max)
        except KintsugiError as error:
            log.warning("the engines' description is out of date: %s", error)
        except Exception:
            log.exception("the engines' description is out of date")

    async def close(self) -> None:
        await _end(self._renewing)
        await super().close()


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Spaces:
    """The chunk spaces of the model that the engines serve. For one event loop."""

    def __init__(
        self,
        recent_info: RecentInfo,
        tokenizer: str = "",
        name_key: Callable[[str], bytes] = lambda namespace: b"",
    ) -> None:
        """``tokenizer``: the digest of ours; engines with another one are ignored. Empty: every engine's is
        accepted. ``name_key``: `ChunkStore.name_key`."""
        self._name_key = name_key
        self._recent_info = recent_info
        self._tokenizer = tokenizer
        self._own_info: EngineInfo | None = None

    @property
    def tokens_max(self) -> int | None:
        """The most tokens that the model reads and writes; None before an engine has answered."""
        known = self._recent_info.known
        return None if known is None else known.max_model_len

    @property
    def model(self) -> str | None:
        """The name of the model; None before an engine has answered."""
        known = self._recent_info.known
        return None if known is None else known.model

    async def info(self) -> EngineInfo:
        """The newest description of an engine with our tokenizer: while one model replaces another, engines
        of both answer. Raises `Unavailable` if none has answered yet."""
        info = await self._recent_info.get_stale(INFO_TTL_S)
        if not self._tokenizer or info.tokenizer in ("", self._tokenizer):
            self._own_info = info
        if self._own_info is None:
            raise Unavailable("only engines of another model answer yet; try again later")
        return self._own_info

    async def find(self, namespace: str) -> ChunkSpace:
        """The namespace's chunk space. Raises `Unavailable`."""
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

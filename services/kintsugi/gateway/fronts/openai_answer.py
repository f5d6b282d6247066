"""Asks an engine's OpenAI endpoints, and finds what is ours in their answers.

A piece of an answer is a whole response's JSON, or one event of a stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kintsugi.core.backend import EngineBackend
from kintsugi.core.exchange import OpenAICall, OpenAIHead
from kintsugi.core.request import PARAMS_KEY
from kintsugi.gateway.answers import Ask
from kintsugi.gateway.prompts import Prompts
from kintsugi.gateway.saves import ToSave
from kintsugi.gateway.tracing import TIMES, without_times
from kintsugi.store.protocol.callers import Caller, Verb

_DATA = b"data: "
_NAMED = f'"{PARAMS_KEY}"'.encode()
_DETAILS = b'"prompt_tokens_details"'
_TIMED = tuple(f'"{name}"'.encode() for name in TIMES)


class OpenAIAsk(Ask[OpenAIHead | bytes]):
    """A request to an OpenAI endpoint, answered by vLLM's own handlers: the head, then pieces of the body.
    The head alone is no answer yet: vLLM has a stream's ready when the request begins to wait."""

    span_name = "gateway.openai"

    def __init__(self, prompts: Prompts, caller: Caller, call: OpenAICall) -> None:
        super().__init__(prompts.metrics.http, call.path, call.params.namespace, call.request_id, call.trace)
        self.wants_times = call.params.timeline or call.params.explain
        self._caller = caller
        self._prompts = prompts
        self._call = call
        self._head: OpenAIHead | None = None
        """Until it has gone out."""

    def send(
        self, backend: EngineBackend, timeline: bool, trace: Mapping[str, str]
    ) -> AsyncGenerator[OpenAIHead | bytes, None]:
        params = replace(self._call.params, timeline=timeline)
        return backend.openai(replace(self._call, params=params, trace=trace))

    def read(self, item: OpenAIHead | bytes) -> Sequence[OpenAIHead | bytes]:
        if isinstance(item, OpenAIHead):
            self._head = item
            return ()
        found = accounting_in(item)
        if found is not None:
            self.accounting = found
            item = item if self.wants_times else without_times_in(item)
        if not self._caller.may(Verb.LIST):
            item = without_stored_in(item)
        head, self._head = self._head, None
        return (item,) if head is None else (head, item)

    def finish(self, first_s: float) -> Sequence[OpenAIHead]:
        return () if self._head is None else (self._head,)

    async def find_missed(self) -> Sequence[ToSave]:
        if not self._caller.may(Verb.PUT):
            return ()
        return await self._prompts.learn_texts(self.namespace, self._call.chunk_texts)


def accounting_in(piece: bytes) -> Mapping[str, Any] | None:
    """The accounting in a piece; None if it has none."""
    holder = None if _NAMED not in piece else _holder(_document(piece))
    return None if holder is None else holder[PARAMS_KEY]


def without_times_in(piece: bytes) -> bytes:
    """The piece for a caller who did not ask when layers were computed."""
    if not any(name in piece for name in _TIMED):
        return piece
    document = _document(piece)
    holder = _holder(document)
    if holder is None:
        return piece
    holder[PARAMS_KEY] = without_times(holder[PARAMS_KEY])
    return _encode_like(piece, document)


def without_stored_in(piece: bytes) -> bytes:
    """The piece for a caller who may not learn what the store holds: without the accounting, and without how
    many of the prompt's tokens were not computed."""
    if _NAMED not in piece and _DETAILS not in piece:
        return piece
    document = _document(piece)
    if document is None:  # nothing can be taken out of it
        return b""
    while (holder := _holder(document)) is not None:
        del holder[PARAMS_KEY]
    usage = document.get("usage") if isinstance(document, dict) else None
    if isinstance(usage, dict):
        usage.pop("prompt_tokens_details", None)
    return _encode_like(piece, document)


def _encode_like(piece: bytes, document: Any) -> bytes:
    """The document as JSON, as an event of a stream where ``piece`` is one."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    return _DATA + text + b"\n\n" if piece.startswith(_DATA) else text


def _document(piece: bytes) -> Any:
    try:
        return json.loads(piece.removeprefix(_DATA))
    except ValueError:
        return None


def _holder(document: Any) -> dict[str, Any] | None:
    """The mapping whose entry `PARAMS_KEY` is the accounting; None if there is none."""
    if not isinstance(document, dict):
        return None
    for holder in (document, document.get("kv_transfer_params")):
        if isinstance(holder, dict) and isinstance(holder.get(PARAMS_KEY), dict):
            return holder
    return None

"""Sends requests to an engine's OpenAI endpoints, and reads and edits our fields in the answers.

A piece of an answer is a whole response's JSON, or one event of a stream. The fields of the answer are at the
top level of the JSON or, in events of the Responses API, under `response`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kintsugi.core.accounting import ACCOUNTING_KEY
from kintsugi.core.exchange import (
    COMPLETIONS_PATH,
    RESPONSES_PATH,
    EngineBackend,
    OpenAICall,
    OpenAIHead,
    Usage,
)
from kintsugi.core.request import PARAMS_KEY
from kintsugi.gateway.answers import Ask
from kintsugi.gateway.chunks import ToSave
from kintsugi.gateway.fronts.openai_request import (
    ANSWER_LIMITS,
    ANSWERS_MAX,
    CHARS_PER_TOKEN,
    find_prompt_texts,
)
from kintsugi.gateway.prompts import Prompts
from kintsugi.gateway.tracing import (
    Attribute,
    describe_answer,
    describe_request,
)
from kintsugi.store.protocol.access import Caller, Verb

_DATA, _EVENT = b"data: ", b"event: "
_OPENINGS = tuple(_EVENT + name for name in (b"response.created\n", b"response.in_progress\n"))
"""Events that vLLM sends before a request is scheduled."""
_USAGE = b'"usage"'
_FINISHED = b'"finish_reason":"'
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
"""Fields of a usage that hold the number of cached prompt tokens: in completions, and in responses."""
_CACHED = tuple(f'"{name}"'.encode() for name in _DETAILS)
_NOTHING_CACHED = {"cached_tokens": 0, "cache_write_tokens": 0}
ANSWER_TOKENS_ASSUMED = 256
"""Assumed length of an answer that the request does not bound."""
ANSWERED = (200, 500)
"""HTTP statuses after which tokens may have been generated."""
STREAM_TYPE = "text/event-stream"
_NAMED = f'"{PARAMS_KEY}"'.encode()
_READ = (_NAMED, _USAGE, _FINISHED, *_CACHED)
"""Marks of the pieces that are parsed; all others are sent unread."""


class OpenAIAsk(Ask[OpenAIHead | bytes]):
    """A request to an OpenAI endpoint, answered by vLLM's own handlers: the head, then pieces of the body.

    The head is held back until the first piece: vLLM returns a stream's head before the request is scheduled.
    """

    span_name = "gateway.openai"

    def __init__(self, prompts: Prompts, caller: Caller, call: OpenAICall) -> None:
        super().__init__(prompts.metrics, call.path, call.params.namespace, call.request_id, call.trace)
        self.ttl_s = call.params.ttl_s
        self._caller = caller
        # Until an engine has reported its model's limit, a caller's number is not trusted.
        info = prompts.spaces.known_info
        answer_tokens_max = ANSWER_TOKENS_ASSUMED if info is None else info.max_model_len
        self.tokens_asked, answer_tokens = estimate_tokens(call.path, call.body, answer_tokens_max)
        self.tokens = self.tokens_asked + answer_tokens
        self._prompts = prompts
        self._call = call
        self._head: OpenAIHead | None = None
        """The head, until it is sent."""
        self._opening: list[bytes] = []
        """Events that are sent with the head."""
        self._is_stream = False
        self._is_refused = False
        self._pieces = 0
        self._usage: Usage | None = None
        self._finish_reasons: list[str] = []

    def send(
        self, backend: EngineBackend, trace: Mapping[str, str]
    ) -> AsyncGenerator[OpenAIHead | bytes, None]:
        params = replace(
            self._call.params,
            shared=self.privacy.shared,
            chunk_tokens_multiple=self.privacy.expert.chunk_tokens_multiple,
            discover=self.privacy.discovers,
            learn=self.privacy.expert.learn,
        )
        return backend.openai(replace(self._call, params=params, trace=trace))

    def read(self, item: OpenAIHead | bytes) -> Sequence[OpenAIHead | bytes]:
        if isinstance(item, OpenAIHead):
            self._head, self._opening = item, []
            self._is_stream = item.content_type.startswith(STREAM_TYPE)
            self._is_refused = item.status not in ANSWERED
            self.is_counted = self.is_counted and not self._is_refused  # a refusal has no outcome
            return ()
        self._pieces += 1
        if self._head is not None and item.startswith(_OPENINGS):
            self._opening.append(item)
            return ()
        return (*self._begin(), self._read_piece(item) if any(mark in item for mark in _READ) else item)

    def _read_piece(self, item: bytes) -> bytes:
        """Note the accounting, usage and finish reasons of a piece; return the piece for the caller."""
        piece = Piece(item)
        if (found := piece.accounting) is not None:
            self.accounting = found
        self._usage = piece.usage or self._usage
        self._finish_reasons += piece.finish_reasons[: ANSWERS_MAX - len(self._finish_reasons)]
        if not self.shows_accounting:
            piece.remove_accounting()
        return piece.to_bytes()

    def _begin(self) -> Sequence[OpenAIHead | bytes]:
        """The head and the opening events, unless they were sent."""
        if self._head is None:
            return ()
        begun: list[OpenAIHead | bytes] = [self._head, *self._opening]
        self._head, self._opening = None, []
        return begun

    def describe_request(self) -> Mapping[str, Attribute]:
        return describe_request(self._call.path, self._call.body)

    def describe_answer(self) -> Mapping[str, Attribute]:
        info = self._prompts.spaces.known_info
        return describe_answer(self._usage, info, self.request_id, self._finish_reasons)

    def first_token_s(self, first_s: float) -> float:
        """Time to first token. A whole response arrives after its last token, so the engine's own measurement
        is used for it."""
        ttft_ms = (self.accounting or {}).get("ttft_ms")
        if self._is_stream or not isinstance(ttft_ms, int | float):
            return first_s
        return min(first_s, self.sent_s + ttft_ms / 1e3)

    def finish(self, first_s: float) -> Sequence[OpenAIHead | bytes]:
        if self._is_refused:
            self.tokens_unused = self.tokens
        elif self._usage is not None:
            self.tokens_unused = self.tokens - self._usage.prompt_tokens - self._usage.completion_tokens
        elif self._is_stream:  # nearly every event is one token
            self.tokens_unused = self.tokens - self.tokens_asked - self._pieces
        return self._begin()

    async def find_missed(self) -> Sequence[ToSave]:
        if self._call.params.no_store or not self._caller.may(Verb.PUT):
            return ()
        return await self._prompts.learn_texts(self.namespace, self._call.chunk_texts)


class Piece:
    """A whole response's JSON, or one event of a stream. Parsed once, and encoded again only if changed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._before, text = b"", data
        """What precedes an event's JSON."""
        if data.startswith((_DATA, _EVENT)):
            opening, separator, text = data.partition(_DATA)
            self._before = opening + separator
        self._document: Any = None
        """The JSON; None if it cannot be parsed."""
        with suppress(ValueError):
            self._document = json.loads(text)
        document = _mapping(self._document)
        self._answer = _mapping(document.get("response")) or document
        self._usage = _mapping(self._answer.get("usage"))
        self._details = _mapping(next((self._usage[name] for name in _DETAILS if name in self._usage), None))
        self._is_changed = False

    def to_bytes(self) -> bytes:
        """The piece as it is sent."""
        if not self._is_changed:
            return self._data
        text = json.dumps(self._document, ensure_ascii=False, separators=(",", ":")).encode()
        return self._before + text + b"\n\n" if self._before else text

    @property
    def accounting(self) -> Mapping[str, Any] | None:
        """None if the piece has none."""
        return _mapping(_mapping(self._answer.get(ACCOUNTING_KEY)).get(PARAMS_KEY)) or None

    @property
    def usage(self) -> Usage | None:
        """None if the piece has none."""
        asked = self._usage.get("prompt_tokens", self._usage.get("input_tokens"))
        answered = self._usage.get("completion_tokens", self._usage.get("output_tokens"))
        counts: list[Any] = [asked, answered or 0, self._details.get("cached_tokens") or 0]
        return Usage(*counts) if all(type(count) is int and count >= 0 for count in counts) else None

    @property
    def finish_reasons(self) -> list[str]:
        """Reasons in the piece why answers ended."""
        choices = self._answer.get("choices")
        found = [_mapping(one).get("finish_reason") for one in (choices if isinstance(choices, list) else ())]
        if not found and self.usage is not None:
            found = [self._answer.get("status")]
        return [reason for reason in found if isinstance(reason, str)]

    def remove_accounting(self) -> None:
        """Remove the accounting and the number of cached tokens, for a caller who may not know what was found
        in the cache. A piece that cannot be parsed and may hold them becomes empty."""
        if not any(name in self._data for name in (_NAMED, *_CACHED)):
            return
        if self._document is None:
            self._data = b""
            return
        _mapping(self._answer.get(ACCOUNTING_KEY)).pop(PARAMS_KEY, None)
        self._usage.pop("prompt_tokens_details", None)
        if "input_tokens_details" in self._usage:  # clients of the Responses API require it
            self._usage["input_tokens_details"] = _NOTHING_CACHED
        self._is_changed = True


def _mapping(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object; otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def estimate_tokens(
    path: str, body: Mapping[str, Any], answer_tokens_max: float = float("inf")
) -> tuple[int, int]:
    """Estimate the number of tokens in a request's prompts, and in its answers. ``answer_tokens_max`` bounds
    each answer, whatever the request specifies."""
    prompt = body.get("prompt") if path == COMPLETIONS_PATH else None
    prompts = len(prompt) if isinstance(prompt, list) and not _is_tokens(prompt) else 1
    texts = find_prompt_texts(path, body)
    asked = sum(1 if isinstance(one, int) else len(one) // CHARS_PER_TOKEN + 1 for one in texts)
    most = next(
        (body[name] for name in ANSWER_LIMITS[path] if isinstance(body.get(name), int)), ANSWER_TOKENS_ASSUMED
    )
    n = body.get("n") if isinstance(body.get("n"), int) and path != RESPONSES_PATH else 1
    most = most if most <= answer_tokens_max else int(answer_tokens_max)
    return asked, max(0, most) * max(1, n or 1) * max(1, prompts)


def _is_tokens(prompt: list[Any]) -> bool:
    """Whether a list is one prompt of token ids rather than several prompts."""
    return all(isinstance(one, int) for one in prompt)

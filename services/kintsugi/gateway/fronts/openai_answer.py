"""Asks an engine's OpenAI endpoints, and finds what is ours in their answers.

A piece of an answer is a whole response's JSON, or one event of a stream. In both, what is said of the answer
stands at the top, or, in the events of the Responses API, under `response`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kintsugi.core.backend import EngineBackend
from kintsugi.core.exchange import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    RESPONSES_PATH,
    OpenAICall,
    OpenAIHead,
    Usage,
)
from kintsugi.core.request import PARAMS_KEY
from kintsugi.gateway.answers import Ask
from kintsugi.gateway.fronts.openai_request import ANSWER_LIMITS, ANSWERS_MAX, find_retention_s
from kintsugi.gateway.prompts import Prompts
from kintsugi.gateway.saves import ToSave
from kintsugi.gateway.tracing import (
    TIMES,
    Attribute,
    count_cached,
    describe_answer,
    describe_request,
    without_times,
)
from kintsugi.store.protocol.callers import Caller, Verb

_DATA, _EVENT = b"data: ", b"event: "
_OPENINGS = tuple(_EVENT + name for name in (b"response.created\n", b"response.in_progress\n"))
"""Events that vLLM has ready before a request has its turn."""
_USAGE = b'"usage"'
_FINISHED = b'"finish_reason":"'
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
"""Where a usage says how many of the prompt's tokens were cached: in completions, and in responses."""
_CACHED = tuple(f'"{name}"'.encode() for name in _DETAILS)
_NOTHING_CACHED = {"cached_tokens": 0, "cache_write_tokens": 0}
_COUNTED = {
    CHAT_PATH: ("messages", "documents"),
    COMPLETIONS_PATH: ("prompt",),
    RESPONSES_PATH: ("instructions", "input"),
}
"""Fields of a body that its prompt is made of."""
_COUNTED_WITHIN = ("content", "text", "contents", "output", "input", "arguments", "summary")
CHARS_PER_TOKEN = 4
"""About, of English text: what a prompt costs is estimated before it is tokenised."""
ANSWER_TOKENS_ASSUMED = 256
"""Length of an answer whose request does not bound it."""
ANSWERED = (200, 500)
"""HTTP statuses with which something may have been generated."""
STREAM_TYPE = "text/event-stream"
_NAMED = f'"{PARAMS_KEY}"'.encode()
_TIMED = tuple(f'"{name}"'.encode() for name in TIMES)


class OpenAIAsk(Ask[OpenAIHead | bytes]):
    """A request to an OpenAI endpoint, answered by vLLM's own handlers: the head, then pieces of the body.
    The head alone is no answer yet: vLLM has a stream's ready when the request begins to wait."""

    span_name = "gateway.openai"

    def __init__(self, prompts: Prompts, caller: Caller, call: OpenAICall) -> None:
        super().__init__(prompts.metrics.http, call.path, call.params.namespace, call.request_id, call.trace)
        self.wants_times = call.params.timeline or call.params.explain
        self.ttl_s = call.params.ttl_s
        self._caller = caller
        priority = call.body.get("priority")
        self.is_negative_priority = isinstance(priority, int) and priority < 0
        # Before an engine has told what its model can write, a caller's number is not believed.
        answer_tokens_max = prompts.tokens_max or ANSWER_TOKENS_ASSUMED
        self.tokens_asked, answer_tokens = estimate_tokens(call.path, call.body, answer_tokens_max)
        self.tokens = self.tokens_asked + answer_tokens
        self._prompts = prompts
        self._call = call
        self._head: OpenAIHead | None = None
        """Until it has gone out."""
        self._opening: list[bytes] = []
        """Events that go out with the head."""
        self._is_stream = False
        self._is_refused = False
        self._pieces = 0
        self._usage: Usage | None = None
        self._finish_reasons: list[str] = []
        prompt = call.body.get("prompt")
        self._has_one_prompt = not isinstance(prompt, list) or len(prompt) == 1 or _is_tokens(prompt)

    def send(
        self, backend: EngineBackend, timeline: bool, trace: Mapping[str, str]
    ) -> AsyncGenerator[OpenAIHead | bytes, None]:
        own = self._call.params
        params = replace(
            own,
            # What the engine discovers. Chunks that it missed are filled with what the caller itself says.
            ttl_s=find_retention_s(self._call.body) if own.ttl_s is None else own.ttl_s,
            timeline=timeline,
            shared=self.privacy.shared,
            chunk_tokens_multiple=self.privacy.expert.chunk_tokens_multiple,
            discover=self.privacy.discovers,
        )
        return backend.openai(replace(self._call, params=params, trace=trace))

    def read(self, item: OpenAIHead | bytes) -> Sequence[OpenAIHead | bytes]:
        if isinstance(item, OpenAIHead):
            self._head, self._opening = item, []
            self._is_stream = item.content_type.startswith(STREAM_TYPE)
            self._is_refused = item.status not in ANSWERED
            return ()
        self._pieces += 1
        if self._head is not None and item.startswith(_OPENINGS):
            self._opening.append(item)
            return ()
        found = accounting_in(item)
        if found is not None:
            self.accounting = found
            if self._has_one_prompt:  # of several, the accounting is the first's
                item = with_cached_tokens_in(item, found)
        if _USAGE in item or _FINISHED in item:
            self._note_end(_document(item))
        if not self.shows_accounting:
            item = without_accounting_in(item)
        elif found is not None and not self.wants_times:
            item = without_times_in(item)
        return (*self._begin(), item)

    def _begin(self) -> Sequence[OpenAIHead | bytes]:
        """What goes out before the answer's first token, or its error, and has not yet."""
        if self._head is None:
            return ()
        begun: list[OpenAIHead | bytes] = [self._head, *self._opening]
        self._head, self._opening = None, []
        return begun

    def describe_request(self) -> Mapping[str, Attribute]:
        return describe_request(self._call.path, self._call.body)

    def describe_answer(self) -> Mapping[str, Attribute]:
        return describe_answer(self._usage, self._prompts.model, self.request_id, self._finish_reasons)

    def _note_end(self, document: Any) -> None:
        """Notes what a piece says of how much was used, and why answers ended."""
        usage = usage_in(document)
        self._usage = usage or self._usage
        answer = _answer_in(document) or {}
        choices = answer.get("choices")
        reasons = [
            choice.get("finish_reason")
            for choice in (choices if isinstance(choices, list) else ())
            if isinstance(choice, dict)
        ]
        if usage is not None and not reasons:
            reasons.append(answer.get("status"))
        for reason in reasons:
            if isinstance(reason, str) and len(self._finish_reasons) < ANSWERS_MAX:
                self._finish_reasons.append(reason)

    def first_token_s(self, first_s: float) -> float:
        """A whole response is one event, and its last token is the last of many: the engine tells when the
        first was there."""
        ttft_ms = (self.accounting or {}).get("ttft_ms")
        if self._is_stream or not isinstance(ttft_ms, int | float):
            return first_s
        return min(first_s, self.sent_s + ttft_ms / 1e3)

    def finish(self, first_s: float) -> Sequence[OpenAIHead | bytes]:
        if self._is_refused:
            self.tokens_unused = self.tokens
        elif self._usage is not None:
            self.tokens_unused = self.tokens - self._usage.prompt_tokens - self._usage.completion_tokens
        elif self._is_stream:  # an event is a token, nearly always
            self.tokens_unused = self.tokens - self.tokens_asked - self._pieces
        return self._begin()

    async def find_missed(self) -> Sequence[ToSave]:
        if self._call.params.no_store or not self._caller.may(Verb.PUT):
            return ()
        return await self._prompts.learn_texts(self.namespace, self._call.chunk_texts)


def accounting_in(piece: bytes) -> Mapping[str, Any] | None:
    """The accounting in a piece; None if it has none."""
    holder = None if _NAMED not in piece else _holder(_document(piece))
    return None if holder is None else holder[PARAMS_KEY]


def usage_in(document: Any) -> Usage | None:
    """The usage that a response or an event has; None if it has none."""
    usage = _usage_of(document)
    if usage is None:
        return None
    details = _details_of(usage) or {}
    asked = usage.get("prompt_tokens", usage.get("input_tokens"))
    answered = usage.get("completion_tokens", usage.get("output_tokens"))
    counts: list[Any] = [asked, answered or 0, details.get("cached_tokens") or 0]
    return Usage(*counts) if all(type(count) is int and count >= 0 for count in counts) else None


def with_cached_tokens_in(piece: bytes, accounting: Mapping[str, Any]) -> bytes:
    """The piece with cached tokens that leave out what a blend computed (`genai.count_cached`)."""
    document = _document(piece) if any(name in piece for name in _CACHED) else None
    details = _details_of(_usage_of(document) or {})
    if details is None or type(details.get("cached_tokens")) is not int:
        return piece
    reported = details["cached_tokens"]
    details["cached_tokens"] = count_cached(reported, accounting)
    return piece if details["cached_tokens"] == reported else _encode_like(piece, document)


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


def without_accounting_in(piece: bytes) -> bytes:
    """The piece for a caller who may not know what was found in the cache: without the accounting, and
    without how many of the prompt's tokens were not computed."""
    if _NAMED not in piece and not any(name in piece for name in _CACHED):
        return piece
    document = _document(piece)
    if document is None:  # nothing can be taken out of it
        return b""
    while (holder := _holder(document)) is not None:
        del holder[PARAMS_KEY]
    usage = _usage_of(document) or {}
    usage.pop("prompt_tokens_details", None)
    if "input_tokens_details" in usage:  # clients of the Responses API count on it
        usage["input_tokens_details"] = _NOTHING_CACHED
    return _encode_like(piece, document)


def estimate_tokens(
    path: str, body: Mapping[str, Any], answer_tokens_max: float = float("inf")
) -> tuple[int, int]:
    """About how many tokens the prompts and the answers of a request have. ``answer_tokens_max``: the most
    that one answer can have, whatever the request asks for."""
    prompt = body.get("prompt") if path == COMPLETIONS_PATH else None
    prompts = len(prompt) if isinstance(prompt, list) and not _is_tokens(prompt) else 1
    asked = sum(_count_tokens(body.get(name)) for name in _COUNTED[path])
    most = next(
        (body[name] for name in ANSWER_LIMITS[path] if isinstance(body.get(name), int)), ANSWER_TOKENS_ASSUMED
    )
    n = body.get("n") if isinstance(body.get("n"), int) and path != RESPONSES_PATH else 1
    most = most if most <= answer_tokens_max else int(answer_tokens_max)
    return asked, max(0, most) * max(1, n or 1) * max(1, prompts)


def _count_tokens(content: Any) -> int:
    """About how many tokens a text has, a list of token ids, or all texts within messages."""
    if isinstance(content, str):
        return len(content) // CHARS_PER_TOKEN + 1
    if isinstance(content, list):
        return sum(1 if isinstance(one, int) else _count_tokens(one) for one in content)
    if isinstance(content, Mapping):
        return sum(_count_tokens(content.get(name)) for name in _COUNTED_WITHIN)
    return 0


def _is_tokens(prompt: list[Any]) -> bool:
    """Whether a list is one prompt of token ids, not several prompts."""
    return all(isinstance(one, int) for one in prompt)


def _encode_like(piece: bytes, document: Any) -> bytes:
    """The document as JSON, as an event of a stream where ``piece`` is one."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    before, _ = _split(piece)
    return before + text + b"\n\n" if before else text


def _document(piece: bytes) -> Any:
    try:
        return json.loads(_split(piece)[1])
    except ValueError:
        return None


def _split(piece: bytes) -> tuple[bytes, bytes]:
    """What stands before an event's JSON, and the rest. Before that of a whole response stands nothing."""
    if not piece.startswith((_DATA, _EVENT)):
        return b"", piece
    before, data, rest = piece.partition(_DATA)
    return before + data, rest


def _answer_in(document: Any) -> dict[str, Any] | None:
    """The mapping that says what is said of the answer; None if there is none."""
    if not isinstance(document, dict):
        return None
    response = document.get("response")
    return response if isinstance(response, dict) else document


def _usage_of(document: Any) -> dict[str, Any] | None:
    usage = (_answer_in(document) or {}).get("usage")
    return usage if isinstance(usage, dict) else None


def _details_of(usage: Mapping[str, Any]) -> dict[str, Any] | None:
    details = next((usage[name] for name in _DETAILS if name in usage), None)
    return details if isinstance(details, dict) else None


def _holder(document: Any) -> dict[str, Any] | None:
    """The mapping whose entry `PARAMS_KEY` is the accounting; None if there is none."""
    answer = _answer_in(document)
    if answer is None:
        return None
    for holder in (answer, answer.get("kv_transfer_params")):
        if isinstance(holder, dict) and isinstance(holder.get(PARAMS_KEY), dict):
            return holder
    return None

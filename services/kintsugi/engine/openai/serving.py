"""Our subclasses of vLLM's OpenAI requests and handlers: a request carries the state of its call, and streams
can be closed and end with the accounting."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from pydantic import PrivateAttr
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.renderers import TokenizeParams
from vllm.v1.engine.exceptions import EngineDeadError

from kintsugi.core.accounting import ACCOUNTING_KEY, add_up, count_cached
from kintsugi.core.exchange import OpenAICall
from kintsugi.core.request import PARAMS_KEY
from kintsugi.core.spaces import Span

logger = logging.getLogger(__name__)

ANSWER_ROOM_TOKENS = 256
"""Tokens that a truncated prompt leaves for an answer if the request sets no limit."""
_DONE = "data: [DONE]\n\n"
_DATA = "data: "


@dataclass
class CallState:
    """The state of a call, carried by its request through vLLM."""

    call: OpenAICall
    spans: list[tuple[Span, ...] | None] = field(default_factory=list)
    """The chunks of each prompt, in order; None if vLLM tokenised the prompt as a whole."""
    sampled: int = 0
    """Number of prompts whose sampling parameters have been made."""
    streams: list[Any] = field(default_factory=list)
    """Generators of the engine, to be closed."""
    accountings: list[dict[str, Any]] = field(default_factory=list)
    """The accountings of the prompts that have ended."""
    cached_tokens: int = 0
    """Tokens of these prompts that came from the prefix cache or from stored chunks."""
    engine_died: bool = False
    """Whether the engine died during the answer, which vLLM reports as an event."""
    has_begun: bool = False
    """Whether the engine has generated anything."""

    def next_params(self) -> dict[str, Any]:
        """Return `kv_transfer_params` of the next prompt. Without spans the engine finds chunks by
        content."""
        spans = self.spans[self.sampled] if self.sampled < len(self.spans) else None
        self.sampled += 1
        return dataclasses.replace(self.call.params, spans=spans or None).to_mapping()

    def note(self, output: Any) -> None:
        """Note an output of the engine, and the accounting of its prompt once all its answers have ended."""
        self.has_begun = True
        if output.finished:
            accounting = (output.kv_transfer_params or {}).get(PARAMS_KEY) or {}
            self.cached_tokens += count_cached(output.num_cached_tokens or 0, accounting)
            if accounting:
                self.accountings.append(accounting)

    def account(self, text: str) -> str:
        """Return the JSON of a whole answer, or of a stream's last event, with the accounting of all prompts
        and the number of their cached tokens. vLLM reports one prompt's."""
        document = json.loads(text)
        answer = document.get("response") or document
        if self.accountings:
            answer[ACCOUNTING_KEY] = {PARAMS_KEY: add_up(self.accountings)}
        usage = answer.get("usage") or {}
        for name in ("prompt_tokens_details", "input_tokens_details"):
            if usage.get(name):
                usage[name]["cached_tokens"] = self.cached_tokens
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"))

    def note_failure(self, error: Exception) -> None:
        self.engine_died = isinstance(error, EngineDeadError)


@dataclass(frozen=True)
class SegmentParams(TokenizeParams):  # type: ignore[misc]
    """vLLM's tokenisation parameters with the prompt's call."""

    call_state: CallState | None = None

    @staticmethod
    def of(params: Any, state: CallState) -> SegmentParams:
        values = {one.name: getattr(params, one.name) for one in dataclasses.fields(params)}
        return SegmentParams(**values, call_state=state)


class _OurRequest:
    """Overrides for every kind of request. This class must precede vLLM's among the bases."""

    _call_state: Any
    cache_salt: str | None
    vllm_xargs: dict[str, Any] | None

    @property
    def call_state(self) -> CallState:
        """The call, after `take`."""
        return self._call_state  # type: ignore[no-any-return]

    def take(self, state: CallState) -> None:
        """Set the call, and its namespace as the salt, after vLLM's check, which allows no slash."""
        self._call_state = state
        self.cache_salt = state.call.params.namespace

    def build_tok_params(self, model_config: Any) -> Any:
        return SegmentParams.of(super().build_tok_params(model_config), self._call_state)  # type: ignore[misc]

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> Any:
        self.kv_transfer_params = self._call_state.next_params()
        # vLLM makes these the sampling parameters' extra arguments, one mapping for all prompts of a request.
        self.vllm_xargs = dict(self.vllm_xargs or {})
        return super().to_sampling_params(*args, **kwargs)  # type: ignore[misc]


class OurChatRequest(_OurRequest, ChatCompletionRequest):  # type: ignore[misc]
    _call_state: Any = PrivateAttr(None)


class OurCompletionRequest(_OurRequest, CompletionRequest):  # type: ignore[misc]
    _call_state: Any = PrivateAttr(None)


class OurResponsesRequest(_OurRequest, ResponsesRequest):  # type: ignore[misc]
    _call_state: Any = PrivateAttr(None)

    def build_tok_params(self, model_config: Any) -> Any:
        """Truncate a prompt at its beginning, as OpenAI does, so that an answer has room. vLLM would cut off
        the question instead."""
        params = super().build_tok_params(model_config)
        if params.truncate_prompt_tokens is None:
            return params
        room = min(self.max_output_tokens or ANSWER_ROOM_TOKENS, model_config.max_model_len // 2)
        kept = model_config.max_model_len - room
        return dataclasses.replace(
            params, max_output_tokens=room, truncate_prompt_tokens=kept, truncation_side="left"
        )


OurRequest = OurChatRequest | OurCompletionRequest | OurResponsesRequest


CALL: ContextVar[CallState | None] = ContextVar("CALL", default=None)
"""The call that vLLM's handlers answer in this task."""


class NotingClient:
    """An engine's client that notes outputs in the state of their call."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as vLLM's client does. Not a generator itself, because that would take time for
        every token."""
        return self._client.generate(*args, **kwargs, call=CALL.get())


class OurChat(OpenAIServingChat):  # type: ignore[misc]
    def chat_completion_stream_generator(self, request: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        request.call_state.streams.append(outputs)
        return super().chat_completion_stream_generator(request, outputs, *args, **kwargs)


class OurCompletion(OpenAIServingCompletion):  # type: ignore[misc]
    def completion_stream_generator(
        self, request: Any, engine_inputs: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        request.call_state.streams.append(outputs)
        return super().completion_stream_generator(request, engine_inputs, outputs, *args, **kwargs)


class OurResponses(OpenAIServingResponses):  # type: ignore[misc]
    """vLLM's handler of the Responses API. The accounting is in the response of the last event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Whatever the environment says: vLLM stores responses without a bound, and any caller may read them.
        self.enable_store = False

    def responses_stream_generator(
        self, request: Any, sampling_params: Any, contexts: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        request.call_state.streams.append(contexts)
        events = super().responses_stream_generator(request, sampling_params, contexts, *args, **kwargs)
        request.call_state.streams.append(events)
        return self._encode_events(events, request)

    async def _encode_events(self, events: AsyncIterator[Any], request: Any) -> AsyncIterator[str]:
        """Encode the events. A failure becomes the last event, as in vLLM's other streams."""
        try:
            async for event in events:
                yield f"event: {event.type}\n{_DATA}{event.model_dump_json(by_alias=True)}\n\n"
        except EngineDeadError:
            raise
        except Exception as error:
            logger.exception("Request %s failed", request.request_id)
            yield f"{_DATA}{self.create_streaming_error_response(error)}\n\n"
            yield _DONE


class EventsWithAccounting:
    """Adds the accounting to the last event of a stream. After the engine's last output it holds the newest
    event back, which may be the last one."""

    def __init__(self, state: CallState) -> None:
        self._state = state
        self._held = ""

    def pass_on(self, event: str) -> list[str]:
        """Return the events to send after the stream's ``event``."""
        sent, self._held = self._held, ""
        if event == _DONE:
            return [self._add_accounting(sent), event] if sent else [event]
        if self._state.accountings:
            self._held = event
            return [sent] if sent else []
        return [event]

    def end(self) -> list[str]:
        """Return the events to send after the stream's end."""
        return [self._add_accounting(self._held)] if self._held else []

    def _add_accounting(self, event: str) -> str:
        head, mark, text = event.partition(_DATA)
        return f"{head}{mark}{self._state.account(text)}\n\n"

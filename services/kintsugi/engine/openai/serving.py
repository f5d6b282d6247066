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
    """The state of a call that accompanies its request through vLLM."""

    call: OpenAICall
    spans: list[tuple[Span, ...] | None] = field(default_factory=list)
    """The chunks of each of its prompts, in order; None where vLLM tokenised the prompt whole."""
    sampled: int = 0
    """Prompts whose sampling parameters were made."""
    streams: list[Any] = field(default_factory=list)
    """What the engine yields from, to be closed."""
    accounting: dict[str, Any] | None = None
    engine_died: bool = False
    """Whether the engine died during the answer; vLLM turns the error into an event."""
    has_begun: bool = False
    """Whether the engine has generated anything."""

    def next_params(self) -> dict[str, Any]:
        """`kv_transfer_params` of the next prompt. Without spans the engine looks for chunks by content."""
        spans = self.spans[self.sampled] if self.sampled < len(self.spans) else None
        self.sampled += 1
        return dataclasses.replace(self.call.params, spans=spans or None).to_mapping()

    def note(self, output: Any) -> None:
        """Note an output of the engine. Of several prompts or answers, the accounting is the first's."""
        self.has_begun = True
        if output.finished and self.accounting is None:
            self.accounting = (output.kv_transfer_params or {}).get(PARAMS_KEY)

    def note_failure(self, error: Exception) -> None:
        self.engine_died = isinstance(error, EngineDeadError)


@dataclass(frozen=True)
class SegmentParams(TokenizeParams):  # type: ignore[misc]
    """vLLM's tokenisation parameters, and the call that the prompt belongs to."""

    call_state: CallState | None = None

    @staticmethod
    def of(params: Any, state: CallState) -> SegmentParams:
        values = {one.name: getattr(params, one.name) for one in dataclasses.fields(params)}
        return SegmentParams(**values, call_state=state)


class _OurRequest:
    """Overrides for every kind of request. Stands before vLLM's class among the bases."""

    _call_state: Any
    cache_salt: str | None
    vllm_xargs: dict[str, Any] | None

    @property
    def call_state(self) -> CallState:
        """The call, once it has been taken."""
        return self._call_state  # type: ignore[no-any-return]

    def take(self, state: CallState) -> None:
        """Belong to a call, with its namespace's salt: set behind vLLM's check, which allows no slash."""
        self._call_state = state
        self.cache_salt = state.call.params.namespace

    def build_tok_params(self, model_config: Any) -> Any:
        return SegmentParams.of(super().build_tok_params(model_config), self._call_state)  # type: ignore[misc]

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> Any:
        self.kv_transfer_params = self._call_state.next_params()
        # Of these vLLM makes the parameters' extra arguments, one mapping for all prompts of a request.
        self.vllm_xargs = dict(self.vllm_xargs or {})
        return super().to_sampling_params(*args, **kwargs)  # type: ignore[misc]


class OurChatRequest(_OurRequest, ChatCompletionRequest):  # type: ignore[misc]
    _call_state: Any = PrivateAttr(None)


class OurCompletionRequest(_OurRequest, CompletionRequest):  # type: ignore[misc]
    _call_state: Any = PrivateAttr(None)


class OurResponsesRequest(_OurRequest, ResponsesRequest):  # type: ignore[misc]
    _call_state: Any = PrivateAttr(None)

    def build_tok_params(self, model_config: Any) -> Any:
        """A truncated prompt loses its beginning, as with OpenAI, and leaves room for an answer. vLLM would
        cut off the question instead."""
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
"""The call whose request vLLM's handlers work on in this task."""


class NotingClient:
    """An engine's client whose outputs are noted in the state of the call that they answer."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's. A generator here would be one more that each token passes."""
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
    """The accounting stands in the last event's response, as in one that is no stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Whatever the environment says: what vLLM keeps has no bound, and whoever knows an id may read it.
        self.enable_store = False

    def responses_stream_generator(
        self, request: Any, sampling_params: Any, contexts: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        request.call_state.streams.append(contexts)
        events = super().responses_stream_generator(request, sampling_params, contexts, *args, **kwargs)
        request.call_state.streams.append(events)
        return self._encode_events(events, request)

    async def _encode_events(self, events: AsyncIterator[Any], request: Any) -> AsyncIterator[str]:
        """The events as they are sent. A failure is the last one, as in vLLM's other streams."""
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
    """Adds the accounting to the last event of a stream. From the engine's last output on, the newest event
    is held back, as it may be that one."""

    def __init__(self, state: CallState) -> None:
        self._state = state
        self._held = ""

    def pass_on(self, event: str) -> list[str]:
        """The events that are sent now, once the stream has given ``event``."""
        sent, self._held = self._held, ""
        if event == _DONE:
            return [self._add_accounting(sent), event] if sent else [event]
        if self._state.accounting is not None:
            self._held = event
            return [sent] if sent else []
        return [event]

    def end(self) -> list[str]:
        """The events that are sent once the stream has ended."""
        return [self._held] if self._held else []

    def _add_accounting(self, event: str) -> str:
        document = json.loads(event.removeprefix(_DATA)) | {PARAMS_KEY: self._state.accounting}
        return f"{_DATA}{json.dumps(document, ensure_ascii=False)}\n\n"

"""vLLM's handlers of OpenAI's requests, whose streams can be closed and end with the accounting."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.v1.engine.exceptions import EngineDeadError

from kintsugi.core.request import PARAMS_KEY
from kintsugi.engine.openai.requests import CallState

logger = logging.getLogger(__name__)

_DONE = "data: [DONE]\n\n"
_DATA = "data: "


CALL: ContextVar[CallState | None] = ContextVar("CALL", default=None)
"""The call whose request vLLM's handlers work on in this task."""


class NotingClient:
    """An engine's client that notes which calls the engine has begun to answer."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """As vLLM's."""
        state = CALL.get()
        async with aclosing(self._client.generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                if state is not None:
                    state.has_begun = True
                yield output


class OurChat(OpenAIServingChat):  # type: ignore[misc]
    def chat_completion_stream_generator(self, request: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        state = request.call_state
        state.streams.append(outputs)
        return super().chat_completion_stream_generator(
            request, _note_outputs(outputs, state), *args, **kwargs
        )


class OurCompletion(OpenAIServingCompletion):  # type: ignore[misc]
    def completion_stream_generator(
        self, request: Any, engine_inputs: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        state = request.call_state
        state.streams.append(outputs)
        return super().completion_stream_generator(
            request, engine_inputs, _note_outputs(outputs, state), *args, **kwargs
        )


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


async def _note_outputs(items: AsyncIterator[Any], state: CallState) -> AsyncIterator[Any]:
    """``items``: outputs, or pairs of a prompt's index and its output."""
    try:
        async for item in items:
            state.note(item[1] if isinstance(item, tuple) else item)
            yield item
    except EngineDeadError:
        state.engine_died = True
        raise


async def with_accounting(events: AsyncIterator[str], state: CallState) -> AsyncIterator[str]:
    """Pass events on. From the engine's last output on, hold the newest one back to add the accounting."""
    held: str | None = None
    async for event in events:
        if event == _DONE and held is not None:
            held = _add_accounting(held, state.accounting)
        if held is not None:
            yield held
            held = None
        if state.accounting is None or event == _DONE:
            yield event
        else:
            held = event
    if held is not None:
        yield held


def _add_accounting(event: str, accounting: Mapping[str, Any] | None) -> str:
    document = json.loads(event.removeprefix(_DATA))
    return f"{_DATA}{json.dumps({**document, PARAMS_KEY: accounting}, ensure_ascii=False)}\n\n"

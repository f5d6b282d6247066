"""vLLM's handlers of OpenAI's requests, whose streams can be closed and end with the accounting."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
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

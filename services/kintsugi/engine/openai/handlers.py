"""Answers OpenAI requests by vLLM's own handlers, with each chunk of a prompt tokenised separately.

Templates, tools, sampling, streaming, usage, logprobs and errors are vLLM's. Three steps are ours, each at
one place in vLLM's code: tokenising a rendered prompt (`BaseRenderer._tokenize_prompt_async`, an attribute of
the renderer), the `kv_transfer_params` of a request (`to_sampling_params`, called after tokenising), and the
accounting in streams (`engine.openai.serving`). Bodies that vLLM would ignore or misread are refused or
corrected first.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.renderers.hf import resolve_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.utils.async_utils import make_async
from vllm.v1.engine.exceptions import EngineDeadError

from kintsugi.core.errors import InvalidField, KintsugiError, NotFound, Unavailable
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, OpenAICall, OpenAIHead
from kintsugi.core.request import trim_spans
from kintsugi.core.spaces import TokenIds
from kintsugi.engine.config import OpenAIOptions
from kintsugi.engine.openai.prompt import SegmentTokenizer, with_documents, with_whole_messages
from kintsugi.engine.openai.serving import (
    CALL,
    CallState,
    EventsWithAccounting,
    NotingClient,
    OurChat,
    OurChatRequest,
    OurCompletion,
    OurCompletionRequest,
    OurRequest,
    OurResponses,
    OurResponsesRequest,
)
from kintsugi.engine.openai.tools import check_response_tools, check_tools

try:
    from vllm.renderers.chat_utils import load_chat_template
except ImportError:  # vLLM 0.31 and before
    from vllm.entrypoints.chat_utils import load_chat_template

logger = logging.getLogger(__name__)

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream"
_DIED = "the engine has died; send the request again"
_UNREADABLE = "vLLM could not make an answer from the generated text; see the engine's log"
_SERVER_ERROR = HTTPStatus.INTERNAL_SERVER_ERROR
_NO_ITEM = "is neither a message (role and content) nor a tool call or tool output in OpenAI's format"


class OpenAIAnswer:
    """An answer of vLLM's handlers: a head, and either a stream of events or a body."""

    def __init__(
        self, head: OpenAIHead, state: CallState, events: AsyncIterator[str] | None = None, body: bytes = b""
    ) -> None:
        self.head = head
        self.events = events
        """vLLM's events, to be passed to `pass_on`; None if the answer is ``body``."""
        self.body = body
        self._state = state
        self._accounted = EventsWithAccounting(state)

    def pass_on(self, event: str) -> list[bytes]:
        """Return the pieces to send after vLLM's ``event``. Raises `Unavailable`."""
        if self._state.engine_died:
            raise Unavailable(_DIED)
        return [one.encode() for one in self._accounted.pass_on(event)]

    def end(self) -> list[bytes]:
        """Return the pieces to send after vLLM's last event."""
        return [one.encode() for one in self._accounted.end()]


class OpenAIFront:
    """Answers `OpenAICall`s by one engine, in the event loop of the engine's client."""

    def __init__(
        self,
        client: Any,
        names: Sequence[str],
        prefix_token_ids: tuple[int, ...] = (),
        options: OpenAIOptions | None = None,
    ) -> None:
        """``client`` is a `vllm.v1.engine.async_llm.AsyncLLM`; ``names`` are the model's names for callers,
        the one in answers first.

        Raises vLLM's own errors for an unknown parser or a template that cannot be loaded.
        """
        options = options or OpenAIOptions()
        renderer, model_config = client.renderer, client.model_config
        template = load_chat_template(options.chat_template)
        shared: dict[str, Any] = {
            "request_logger": None,
            "chat_template": template,
            "chat_template_content_format": "auto",
            "tool_parser": options.tool_call_parser,
            "enable_auto_tools": options.tool_call_parser is not None,
            "reasoning_parser": options.reasoning_parser,
        }
        online = OnlineRenderer(model_config=model_config, renderer=renderer, **shared)
        paths = [BaseModelPath(name=name, model_path=model_config.model) for name in names]
        models = OpenAIServingModels(client, paths)
        details = {"enable_prompt_tokens_details": True, "online_renderer": online}
        noted = NotingClient(client)
        self._chat = OurChat(noted, models, "assistant", **shared, **details)
        self._completion = OurCompletion(noted, models, request_logger=None, **details)
        self._responses = OurResponses(noted, models, **shared, **details)
        self._tokenizer = SegmentTokenizer(renderer.get_tokenizer(), prefix_token_ids)
        self._renderer = renderer
        self._whole = renderer._tokenize_prompt_async
        self._parses_tools = options.tool_call_parser is not None
        self._segments = make_async(self._tokenizer.segment_text, executor=renderer._executor)
        renderer._tokenize_prompt_async = self._tokenize_prompt
        resolved = resolve_chat_template(
            renderer.get_tokenizer(), chat_template=template, tools=None, model_config=model_config
        )
        self._template_takes_documents = bool(resolved and re.search(r"\bdocuments\b", resolved))
        online.warmup()

    @asynccontextmanager
    async def ask(self, call: OpenAICall) -> AsyncIterator[OpenAIAnswer]:
        """Return vLLM's answer, to be read inside the block; at its end the request is aborted in the engine.
        Raises `Unavailable` if the engine is dead."""
        state = CallState(call)
        try:
            response = await self._ask_vllm(state, self._create)
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                # vLLM turns a cancellation into an answer.
                raise asyncio.CancelledError
            if isinstance(response, AsyncGenerator):
                state.streams.append(response)
                yield OpenAIAnswer(OpenAIHead(200, STREAM_TYPE), state, response)
            else:
                error = getattr(response, "error", None)
                head = OpenAIHead(200 if error is None else int(error.code), JSON_TYPE)
                body = response.model_dump_json(by_alias=call.path == RESPONSES_PATH)
                yield OpenAIAnswer(head, state, body=(body if error else state.account(body)).encode())
        except EngineDeadError as error:
            raise Unavailable(_DIED) from error
        finally:
            for stream in reversed(state.streams):
                await stream.aclose()

    async def render(self, call: OpenAICall) -> list[TokenIds]:
        """Return the token ids of the call's prompts as `ask` would send them. Raises `InvalidField`,
        `NotFound` or `Unavailable` for vLLM's errors."""
        inputs = await self._ask_vllm(CallState(call), self._render)
        error = getattr(inputs, "error", None)
        if error is None:
            return [TokenIds.of(one.get("prompt_token_ids") or ()) for one in inputs]
        if error.code == HTTPStatus.NOT_FOUND:
            raise NotFound(error.message)
        if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise Unavailable(f"vLLM did not render the prompt: {error.message}")
        raise InvalidField(error.param or "body", error.message)

    async def _ask_vllm(self, state: CallState, ask: Callable[[OurRequest], Awaitable[Any]]) -> Any:
        """Return vLLM's answer to a call's request, or its error."""
        running = CALL.set(state)
        try:
            return await ask(self._request_of(state))
        except EngineDeadError as error:
            raise Unavailable(_DIED) from error
        except KintsugiError:
            raise
        except Exception as error:
            if state.has_begun:  # not a mistake in the request
                logger.exception("Request %s failed", state.call.request_id)
                return create_error_response(_UNREADABLE, "InternalServerError", _SERVER_ERROR)
            if isinstance(error, ValidationError):
                return create_error_response(*_problem_of(error, state.call.body))
            # The same table as vLLM's server: a caller's mistake is a 400, a defect here a 500.
            response = create_error_response(error)
            if response.error.code >= 500:
                logger.exception("Request %s failed", state.call.request_id)
            return response
        finally:
            CALL.reset(running)

    def _request_of(self, state: CallState) -> OurRequest:
        """Make vLLM's request. Raises `InvalidField`, or `ValidationError` for a body that vLLM does not
        accept."""
        call = state.call
        body = {**call.body, "request_id": call.request_id}
        request: OurRequest
        if call.path == CHAT_PATH:
            check_tools(body, self._parses_tools)
            if not self._template_takes_documents:
                body = with_documents(body)
            request = OurChatRequest.model_validate(body)
        elif call.path == COMPLETIONS_PATH:
            request = OurCompletionRequest.model_validate(body)
        elif call.path == RESPONSES_PATH:
            check_response_tools(body)
            check_tools(body, self._parses_tools)
            # vLLM accepts null for some fields, but then fails to make an answer.
            body = {name: value for name, value in body.items() if value is not None}
            # vLLM names responses as their requests, completions with a prefix.
            body["request_id"] = f"resp_{call.request_id}"
            body["input"] = with_whole_messages(body.get("input"))
            request = OurResponsesRequest.model_validate(body)
        else:
            raise InvalidField("path", f"{call.path!r} is not a path that an engine answers")
        request.take(state)
        return request

    async def _create(self, request: OurRequest) -> Any:
        """Return a stream of events, a response or an error."""
        raw = _raw_request(request.call_state.call.trace)
        if isinstance(request, OurChatRequest):
            return await self._chat.create_chat_completion(request, raw)
        if isinstance(request, OurResponsesRequest):
            return await self._responses.create_responses(request, raw)
        return await self._completion.create_completion(request, raw)

    async def _render(self, request: OurRequest) -> Any:
        """Return vLLM's inputs, one per prompt, or an error."""
        if isinstance(request, OurCompletionRequest):
            return await self._completion.render_completion_request(request)
        if isinstance(request, OurResponsesRequest):
            error = await self._responses._check_model(request)
            result = error or await self._responses.online_renderer.render_responses(request)
            return [result.engine_input] if hasattr(result, "engine_input") else result
        rendered = await self._chat.render_chat_request(request)
        return rendered[1] if isinstance(rendered, tuple) else rendered

    async def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        """Tokenise a prompt in place of the renderer's method. vLLM calls it for a request's prompts in
        order."""
        state = getattr(params, "call_state", None)
        if state is None or not state.call.chunk_texts or not _may_be_cut(params):
            if state is not None:
                state.spans.append(None)
            return await self._whole(prompt, params)
        place = len(state.spans)
        state.spans.append(None)
        segmented = await self._segments(prompt["prompt"], state.call.chunk_texts, params.add_special_tokens)
        multiple = state.call.params.chunk_tokens_multiple
        state.spans[place] = trim_spans(segmented.spans, multiple)
        return self._renderer._build_tokens_prompt(segmented.token_ids, prompt)


def _may_be_cut(params: Any) -> bool:
    """Return whether a prompt may be tokenised in pieces. Truncated prompts and requests for offsets may
    not."""
    return params.truncate_prompt_tokens is None and not params.return_token_offsets


def _raw_request(trace: Mapping[str, str]) -> Request:
    """Make a request with the headers that vLLM's handlers read."""
    headers = [(name.lower().encode(), value.encode()) for name, value in trace.items()]
    return Request({"type": "http", "headers": headers})


def _problem_of(error: ValidationError, body: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return message, type, status and field of the error for a body that vLLM's request does not accept."""
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    if first["loc"][:1] == ("input",) and isinstance(body.get("input"), list):
        # Pydantic reports one error per possible kind of item.
        places = [one["loc"] for one in errors if one["loc"][:1] == ("input",)]
        index = next((part for place in places for part in place if isinstance(part, int)), 0)
        where = f"input[{index}]"
        return f"{where}: {_NO_ITEM}", "BadRequestError", HTTPStatus.BAD_REQUEST, where
    where = ".".join(str(part) for part in first["loc"] if re.fullmatch(r"\w+", str(part)))
    cause = first.get("ctx", {}).get("error")
    where = getattr(cause, "parameter", None) or where
    message = f"{where}: {first['msg']}" if where else str(first["msg"])
    return message, "BadRequestError", HTTPStatus.BAD_REQUEST, where or None

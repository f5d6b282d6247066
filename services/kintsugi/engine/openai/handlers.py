"""vLLM's own OpenAI handlers over an engine, with every chunk of a prompt tokenised alone.

Templates, tools, sampling, streaming, usage, logprobs and errors are vLLM's. Three things are ours, each at
one place of vLLM's code: what a rendered prompt is tokenised to (`BaseRenderer._tokenize_prompt_async`, an
attribute of the renderer), the `kv_transfer_params` of a request (`to_sampling_params`, called once the
prompt is tokenised), and the accounting of a streamed answer, which vLLM leaves out (stream generators).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from pydantic import PrivateAttr, ValidationError
from starlette.requests import Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.renderers import TokenizeParams
from vllm.renderers.hf import resolve_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.utils.async_utils import make_async
from vllm.v1.engine.exceptions import EngineDeadError

from kintsugi.core.deploy import OpenAISpec
from kintsugi.core.errors import InvalidField, KintsugiError, NotFound, Unavailable
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, OpenAICall, OpenAIHead
from kintsugi.core.request import PARAMS_KEY, trim_spans
from kintsugi.core.spaces import Span
from kintsugi.core.tokens import TokenIds
from kintsugi.engine.openai.prompt import SegmentTokenizer, with_documents
from kintsugi.engine.openai.tools import check_tools

try:
    from vllm.renderers.chat_utils import load_chat_template
except ImportError:  # vLLM 0.31 and before
    from vllm.entrypoints.chat_utils import load_chat_template

logger = logging.getLogger(__name__)

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream"
_DONE = "data: [DONE]\n\n"
_DATA = "data: "
_DIED = "the engine has died; send the request to another"


@dataclass
class _Asked:
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

    def next_params(self) -> dict[str, Any]:
        """`kv_transfer_params` of the next prompt. Without spans the engine looks for chunks by content."""
        spans = self.spans[self.sampled] if self.sampled < len(self.spans) else None
        self.sampled += 1
        return dataclasses.replace(self.call.params, spans=spans or None).to_mapping()

    def note(self, output: Any) -> None:
        if output.finished and self.accounting is None:
            self.accounting = (output.kv_transfer_params or {}).get(PARAMS_KEY)


@dataclass(frozen=True)
class _SegmentParams(TokenizeParams):  # type: ignore[misc]
    """vLLM's tokenisation parameters, and the call that the prompt belongs to."""

    asked: _Asked | None = None

    @staticmethod
    def of(params: Any, asked: _Asked) -> _SegmentParams:
        values = {one.name: getattr(params, one.name) for one in dataclasses.fields(params)}
        return _SegmentParams(**values, asked=asked)


class _OnOurBehalf:
    """Overrides for both kinds of request. Stands before vLLM's class among the bases."""

    _asked: Any
    cache_salt: str | None

    def take(self, asked: _Asked) -> None:
        """Belong to a call, with its namespace's salt: set behind vLLM's check, which allows no slash."""
        self._asked = asked
        self.cache_salt = asked.call.params.namespace

    def build_tok_params(self, model_config: Any) -> Any:
        return _SegmentParams.of(super().build_tok_params(model_config), self._asked)  # type: ignore[misc]

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> Any:
        self.kv_transfer_params = self._asked.next_params()
        return super().to_sampling_params(*args, **kwargs)  # type: ignore[misc]


class _ChatRequest(_OnOurBehalf, ChatCompletionRequest):  # type: ignore[misc]
    _asked: Any = PrivateAttr(None)


class _CompletionRequest(_OnOurBehalf, CompletionRequest):  # type: ignore[misc]
    _asked: Any = PrivateAttr(None)


_OurRequest = _ChatRequest | _CompletionRequest


class _Chat(OpenAIServingChat):  # type: ignore[misc]
    def chat_completion_stream_generator(self, request: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        asked = request._asked
        asked.streams.append(outputs)
        return super().chat_completion_stream_generator(
            request, _note_outputs(outputs, asked), *args, **kwargs
        )


class _Completion(OpenAIServingCompletion):  # type: ignore[misc]
    def completion_stream_generator(
        self, request: Any, engine_inputs: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        asked = request._asked
        asked.streams.append(outputs)
        return super().completion_stream_generator(
            request, engine_inputs, _note_outputs(outputs, asked), *args, **kwargs
        )


async def _note_outputs(items: AsyncIterator[Any], asked: _Asked) -> AsyncIterator[Any]:
    """``items``: outputs, or pairs of a prompt's index and its output."""
    try:
        async for item in items:
            asked.note(item[1] if isinstance(item, tuple) else item)
            yield item
    except EngineDeadError:
        asked.engine_died = True
        raise


class OpenAIFront:
    """Answers `OpenAICall`s on one engine, in the event loop of the engine's client."""

    def __init__(
        self,
        client: Any,
        names: Sequence[str],
        prefix_token_ids: tuple[int, ...] = (),
        options: OpenAISpec | None = None,
    ) -> None:
        """``client`` is a `vllm.v1.engine.async_llm.AsyncLLM`; ``names`` those that callers may use
        for the model, the one in answers first.

        Raises what vLLM raises for an unknown parser or a template that does not load.
        """
        options = options or OpenAISpec()
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
        self._chat = _Chat(client, models, "assistant", **shared, **details)
        self._completion = _Completion(client, models, request_logger=None, **details)
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

    async def answer(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        """The head, then pieces of the body. Raises `Unavailable` where the engine is dead.

        Closing the generator, or cancelling who awaits it, aborts the request in the engine.
        """
        asked = _Asked(call)
        try:
            response = await self._ask_vllm(asked, self._create)
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                # vLLM makes an answer of a cancellation that it meets.
                raise asyncio.CancelledError
            if isinstance(response, AsyncGenerator):
                asked.streams.append(response)
                yield OpenAIHead(200, STREAM_TYPE)
                async for event in _with_accounting(response, asked):
                    if asked.engine_died:
                        raise Unavailable(_DIED)
                    yield event.encode()
                return
            error = getattr(response, "error", None)
            yield OpenAIHead(200 if error is None else int(error.code), JSON_TYPE)
            yield response.model_dump_json().encode()
        finally:
            for stream in reversed(asked.streams):
                await stream.aclose()

    async def render(self, call: OpenAICall) -> list[TokenIds]:
        """The token ids of the call's prompts, as `answer` would send them. Raises `InvalidField` and
        `NotFound` for what vLLM refuses, and `Unavailable`."""
        inputs = await self._ask_vllm(_Asked(call), self._render)
        error = getattr(inputs, "error", None)
        if error is None:
            return [TokenIds.of(one.get("prompt_token_ids") or ()) for one in inputs]
        if error.code == HTTPStatus.NOT_FOUND:
            raise NotFound(error.message)
        if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise Unavailable(f"vLLM did not render the prompt: {error.message}")
        raise InvalidField(error.param or "body", error.message)

    async def _ask_vllm(self, asked: _Asked, ask: Callable[[_OurRequest], Awaitable[Any]]) -> Any:
        """What vLLM answers to a call's request, or its error."""
        try:
            return await ask(self._request_of(asked))
        except EngineDeadError as error:
            raise Unavailable(_DIED) from error
        except KintsugiError:
            raise
        except ValidationError as error:
            return create_error_response(*_problem_of(error))
        except Exception as error:
            # The same table by which vLLM's server answers: a caller's mistake is a 400, ours a 500.
            response = create_error_response(error)
            if response.error.code >= 500:
                logger.exception("Request %s failed", asked.call.request_id)
            return response

    def _request_of(self, asked: _Asked) -> _OurRequest:
        """Raises `InvalidField`, and `ValidationError` for a body that vLLM does not accept."""
        call = asked.call
        body = {**call.body, "request_id": call.request_id}
        request: _OurRequest
        if call.path == CHAT_PATH:
            check_tools(body, self._parses_tools)
            if not self._template_takes_documents:
                body = with_documents(body)
            request = _ChatRequest.model_validate(body)
        elif call.path == COMPLETIONS_PATH:
            request = _CompletionRequest.model_validate(body)
        else:
            raise InvalidField("path", f"{call.path!r} is neither {CHAT_PATH} nor {COMPLETIONS_PATH}")
        request.take(asked)
        return request

    async def _create(self, request: _OurRequest) -> Any:
        """A stream of events, a response or an error."""
        raw = _raw_request(request._asked.call.trace)
        if isinstance(request, _ChatRequest):
            return await self._chat.create_chat_completion(request, raw)
        return await self._completion.create_completion(request, raw)

    async def _render(self, request: _OurRequest) -> Any:
        """vLLM's inputs, one for each prompt, or an error."""
        if not isinstance(request, _ChatRequest):
            return await self._completion.render_completion_request(request)
        rendered = await self._chat.render_chat_request(request)
        return rendered[1] if isinstance(rendered, tuple) else rendered

    async def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        """Replaces the renderer's own. vLLM calls it for the prompts of a request in order."""
        asked = getattr(params, "asked", None)
        if asked is None or not asked.call.chunk_texts or not _may_be_cut(params):
            if asked is not None:
                asked.spans.append(None)
            return await self._whole(prompt, params)
        place = len(asked.spans)
        asked.spans.append(None)
        segmented = await self._segments(prompt["prompt"], asked.call.chunk_texts, params.add_special_tokens)
        multiple = asked.call.params.chunk_tokens_multiple
        asked.spans[place] = trim_spans(segmented.spans, multiple)
        return self._renderer._build_tokens_prompt(segmented.token_ids, prompt)


def _may_be_cut(params: Any) -> bool:
    """Truncation would cut chunks, and offsets are of the whole text."""
    return params.truncate_prompt_tokens is None and not params.return_token_offsets


async def _with_accounting(events: AsyncIterator[str], asked: _Asked) -> AsyncIterator[str]:
    """Pass events on. From the engine's last output on, hold the newest one back to add the accounting."""
    held: str | None = None
    async for event in events:
        if event == _DONE and held is not None:
            held = _add_accounting(held, asked.accounting)
        if held is not None:
            yield held
            held = None
        if asked.accounting is None or event == _DONE:
            yield event
        else:
            held = event
    if held is not None:
        yield held


def _add_accounting(event: str, accounting: Mapping[str, Any] | None) -> str:
    document = json.loads(event.removeprefix(_DATA))
    return f"{_DATA}{json.dumps({**document, PARAMS_KEY: accounting}, ensure_ascii=False)}\n\n"


def _raw_request(trace: Mapping[str, str]) -> Request:
    """A request with the headers that vLLM's handlers read."""
    headers = [(name.lower().encode(), value.encode()) for name, value in trace.items()]
    return Request({"type": "http", "headers": headers})


def _problem_of(error: ValidationError) -> tuple[Any, ...]:
    """Message, type, status and field of a body that vLLM's request does not accept."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"] if re.fullmatch(r"\w+", str(part)))
    cause = first.get("ctx", {}).get("error")
    where = getattr(cause, "parameter", None) or where
    message = f"{where}: {first['msg']}" if where else str(first["msg"])
    return message, "BadRequestError", HTTPStatus.BAD_REQUEST, where or None

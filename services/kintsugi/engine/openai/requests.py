"""vLLM's requests, each with the call that it answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from pydantic import PrivateAttr
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers import TokenizeParams
from vllm.v1.engine.exceptions import EngineDeadError

from kintsugi.core.exchange import OpenAICall
from kintsugi.core.request import PARAMS_KEY
from kintsugi.core.spaces import Span

ANSWER_ROOM_TOKENS = 256
"""What a truncated prompt leaves for an answer that the request does not bound."""


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

"""What every `EngineBackend` does, whatever answers behind it.

A test module makes a class of `BackendContract` and gives it the fixture `engines`. Engines are slow to
start, so the fixture may outlive a test; prompts differ from test to test.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import pytest

from kintsugi.core.accounting import Outcome
from kintsugi.core.errors import InvalidField, Unavailable, UnknownField
from kintsugi.core.exchange import (
    EngineBackend,
    EngineDelta,
    EngineInfo,
    EngineRequest,
    MatchedChunk,
    OpenAICall,
    OpenAIHead,
    PromptMatch,
)
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, Span, TokenIds

Result = TypeVar("Result")

IDLE_WAIT_S = 10.0


class Engines(ABC):
    """A backend under test, and the event loop that it is for."""

    backend: EngineBackend
    vocabulary: int = 64
    """Token ids below it may be sent."""
    long_answer_tokens: int = 400
    """What takes longer than `IDLE_WAIT_S`, unless somebody ends it."""

    @abstractmethod
    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """In the backend's loop."""

    @abstractmethod
    async def idle(self) -> bool:
        """Whether the engines work on nothing."""

    @abstractmethod
    async def closed(self) -> EngineBackend:
        """A backend of this kind that has been closed."""

    _numbers = itertools.count()

    def tokens(self, length: int) -> TokenIds:
        """Ids that no other test sends in this order."""
        number = next(self._numbers)
        return TokenIds.of(
            [3 + (number * 31 + index * (number + 7)) % (self.vocabulary - 3) for index in range(length)]
        )

    def request(self, prompt: Sequence[int], **sampling: Any) -> EngineRequest:
        number = next(self._numbers)
        params = KintsugiParams("contract", spans=())
        chosen = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling}
        return EngineRequest(f"request-{number}", TokenIds.of(prompt), params, chosen)

    async def answer(self, request: EngineRequest) -> list[EngineDelta]:
        async with aclosing(self.backend.generate(request)) as deltas:
            return [delta async for delta in deltas]


def space_of(info: EngineInfo, namespace: str) -> ChunkSpace:
    fingerprint = ModelFingerprint(bytes.fromhex(info.fingerprint))
    return ChunkSpace(fingerprint, namespace, info.prefix_token_ids, info.portable)


class BackendContract:
    """Subclass it as `Test…` and define the fixture `engines`."""

    @pytest.fixture
    def engines(self) -> Engines:
        raise NotImplementedError

    def test_a_scored_token_has_a_logprob_in_the_first_piece_alone(self, engines: Engines) -> None:
        asked = engines.request(engines.tokens(40))
        pieces = engines.run(engines.answer(asked))
        assert all(one.logprob is None for one in pieces)
        first, *rest = engines.run(engines.answer(dataclasses.replace(asked, scored_token=5)))
        # A busy engine puts several tokens into a piece.
        assert [sum(len(one.token_ids) for one in answer) for answer in (pieces, [first, *rest])] == [4, 4]
        assert first.logprob is not None
        assert first.logprob <= 0.0
        assert all(one.logprob is None for one in rest)

    def test_a_measurement_finds_nothing_that_others_left_in_the_prefix_cache(self, engines: Engines) -> None:
        room = engines.run(engines.backend.info()).max_model_len
        prompt = engines.tokens(min(300, room - 8))  # more than one block of any engine's cache
        measured = dataclasses.replace(engines.request(prompt), measurement="first")
        for request in (
            engines.request(prompt),
            measured,
            dataclasses.replace(measured, measurement="second"),
        ):
            last = engines.run(engines.answer(request))[-1]
            assert last.usage is not None
            assert last.usage.cached_tokens == 0

    def test_it_says_what_it_serves(self, engines: Engines) -> None:
        info = engines.run(engines.backend.info())
        assert info.model
        assert len(bytes.fromhex(info.fingerprint)) == 32
        assert info.max_model_len > 64
        assert info.blending
        assert info == engines.run(engines.backend.info())

    def test_an_answer_ends_with_its_reason_accounting_and_usage(self, engines: Engines) -> None:
        prompt = engines.tokens(20)
        *rest, last = engines.run(engines.answer(engines.request(prompt)))
        for delta in rest:
            assert delta.finish_reason is delta.accounting is delta.usage is None
        assert last.finish_reason == "length"
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (20, 4)
        assert last.accounting is not None
        assert Outcome(last.accounting["outcome"])
        assert sum(len(delta.token_ids) for delta in (*rest, last)) == 4
        assert "".join(delta.text for delta in (*rest, last))

    def test_a_prompt_for_another_model_is_sent_elsewhere(self, engines: Engines) -> None:
        own = engines.run(engines.backend.info()).fingerprint
        request = engines.request(engines.tokens(12))
        assert engines.run(engines.answer(dataclasses.replace(request, fingerprint=own)))
        with pytest.raises(Unavailable, match="another model"):
            engines.run(engines.answer(dataclasses.replace(request, fingerprint="ab" * 32)))

    def test_answers_run_side_by_side(self, engines: Engines) -> None:
        async def ask() -> list[list[EngineDelta]]:
            requests = [engines.request(engines.tokens(12)) for _ in range(8)]
            return await asyncio.gather(*map(engines.answer, requests))

        answers = engines.run(ask())
        assert all(answer[-1].finish_reason == "length" for answer in answers)

    def test_closing_an_answer_ends_the_work(self, engines: Engines) -> None:
        async def leave() -> None:
            request = engines.request(engines.tokens(12), max_tokens=engines.long_answer_tokens)
            async with aclosing(engines.backend.generate(request)) as deltas:
                await anext(deltas)
            async with asyncio.timeout(IDLE_WAIT_S):
                while not await engines.idle():
                    await asyncio.sleep(0.01)

        engines.run(leave())

    def test_cancelling_who_waits_ends_the_work(self, engines: Engines) -> None:
        async def cancel() -> None:
            request = engines.request(engines.tokens(12), max_tokens=engines.long_answer_tokens)
            asking = asyncio.ensure_future(engines.answer(request))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            async with asyncio.timeout(IDLE_WAIT_S):
                while not await engines.idle():
                    await asyncio.sleep(0.01)

        engines.run(cancel())

    def test_what_a_caller_can_mend_is_an_invalid_field(self, engines: Engines) -> None:
        info = engines.run(engines.backend.info())
        with pytest.raises(UnknownField, match="temprature"):
            engines.run(engines.answer(engines.request(engines.tokens(5), temprature=0.5)))
        with pytest.raises(InvalidField, match="max_tokens"):
            engines.run(engines.answer(engines.request(engines.tokens(5), max_tokens=0)))
        for prompt in (TokenIds(), engines.tokens(info.max_model_len + 1)):
            with pytest.raises(InvalidField):
                engines.run(engines.answer(engines.request(prompt)))
        assert engines.run(engines.answer(engines.request(engines.tokens(5))))[-1].finish_reason == "length"

    def test_a_saved_chunk_is_a_hit(self, engines: Engines) -> None:
        info = engines.run(engines.backend.info())
        chunks = [engines.tokens(40), engines.tokens(33)]
        outcomes = engines.run(engines.backend.save("save", "contract", chunks))
        assert [outcome.is_saved for outcome in outcomes] == [True, True]
        prompt, spans = [*info.prefix_token_ids], []
        for chunk in chunks:
            key = ChunkKey.of(space_of(info, "contract"), chunk)
            spans.append(Span(len(prompt), len(prompt) + len(chunk), key))
            prompt += chunk
        request = engines.request([*prompt, *engines.tokens(9)])
        params = KintsugiParams("contract", spans=tuple(spans))
        request = EngineRequest(request.request_id, request.prompt_token_ids, params, request.sampling)
        last = engines.run(engines.answer(request))[-1]
        assert last.accounting is not None
        assert (last.accounting["chunks_hit"], last.accounting["tokens_hit"]) == (2, 73)
        other = KintsugiParams("another", spans=tuple(Span(span.start, span.end) for span in spans))
        request = EngineRequest("other", request.prompt_token_ids, other, request.sampling)
        last = engines.run(engines.answer(request))[-1]
        assert last.accounting is not None
        assert last.accounting.get("chunks_hit", 0) == 0, "another namespace finds nothing"

    def test_one_chunk_that_cannot_be_saved_does_not_fail_the_others(self, engines: Engines) -> None:
        outcomes = engines.run(engines.backend.save("save", "contract", [engines.tokens(16), TokenIds()]))
        assert [outcome.is_saved for outcome in outcomes] == [True, False]
        assert outcomes[1].reason

    def test_an_openai_request_is_answered_head_first(self, engines: Engines) -> None:
        info = engines.run(engines.backend.info())

        async def ask() -> list[OpenAIHead | bytes]:
            body = {"model": info.model, "prompt": "a b c", "max_tokens": 2}
            call = OpenAICall("openai", "/v1/completions", body, KintsugiParams("contract"))
            async with aclosing(engines.backend.openai(call)) as items:
                return [item async for item in items]

        head, *pieces = engines.run(ask())
        assert isinstance(head, OpenAIHead)
        assert head.status == 200
        assert pieces
        assert all(isinstance(piece, bytes) for piece in pieces)

    def test_stored_chunks_are_found_in_a_prompt_that_does_not_mark_them(self, engines: Engines) -> None:
        info, chunk = engines.run(engines.backend.info()), engines.tokens(80)
        (outcome,) = engines.run(engines.backend.save("save", "found", [chunk]))
        assert outcome.is_saved, outcome.reason
        ids = [*engines.tokens(7), *chunk, *engines.tokens(9)]

        def find(namespace: str, prompt: list[int], **more: Any) -> PromptMatch:
            body = {"model": info.model, "prompt": prompt, "max_tokens": 2, **more}
            call = OpenAICall("find", "/v1/completions", body, KintsugiParams(namespace))
            return engines.run(engines.backend.find_chunks(call))

        match = find("found", ids)
        assert match.prompt_tokens == len(ids)
        key = ChunkKey.of(space_of(info, "found"), chunk)
        assert match.chunks == (MatchedChunk("found", key, len(chunk)),)
        assert find("found", engines.tokens(90).to_list()).chunks == ()
        assert find("contract", ids).chunks == ()

    def test_a_closed_backend_answers_nobody(self, engines: Engines) -> None:
        call = OpenAICall("openai", "/v1/completions", {}, KintsugiParams("contract"))

        async def ask() -> None:
            backend = await engines.closed()
            await backend.close()
            with pytest.raises(Unavailable):
                await backend.info()
            with pytest.raises(Unavailable):
                await backend.save("save", "contract", [engines.tokens(16)])
            with pytest.raises(Unavailable):
                await anext(backend.generate(engines.request(engines.tokens(5))))
            with pytest.raises(Unavailable):
                await anext(backend.openai(call))
            with pytest.raises(Unavailable):
                await backend.find_chunks(call)

        engines.run(ask())

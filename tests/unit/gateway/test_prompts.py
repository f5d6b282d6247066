"""Segments and a question become the prompt that the engines' form writes."""

from __future__ import annotations

import asyncio

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import FormName, PromptChunk
from kintsugi.core.spaces import TokenIds
from kintsugi.gateway.chunks import Recent, Spaces
from kintsugi.gateway.metrics import GatewayMetrics
from kintsugi.gateway.prompts import GenerateCall, Prompts
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.segments import ResolvedPrompt, Segment, SegmentResolver
from kintsugi.models.prompt_form import PromptForm
from tests.fakes.chat_templates import CHATML, tokenizer_with
from tests.fakes.stub_backend import StubBackend

CHUNKS = ("Tea is made from leaves of a shrub.\n", "Salt is a mineral.\n")


def resolve(form: PromptForm, question: Segment) -> ResolvedPrompt:
    """As a gateway does whose engines serve in this form."""
    backend = StubBackend(prefix_token_ids=form.head, question_foot=form.foot)

    async def run() -> ResolvedPrompt:
        spaces = Spaces(Recent(backend.info, "no engine answered"))
        resolver = SegmentResolver(form.tokenize, KnownChunks(), None)
        prompts = Prompts(spaces, resolver, GatewayMetrics(), segments_max=8)
        segments = tuple(Segment(text=text) for text in CHUNKS)
        prompt, request = await prompts.resolve(GenerateCall("acme", segments, question))
        assert request.prompt_token_ids == prompt.token_ids
        return prompt

    return asyncio.run(run())


@pytest.mark.parametrize("name", [FormName.CHAT, FormName.PLAIN])
def test_a_question_of_text_is_ended_by_the_form(name: FormName) -> None:
    form = PromptForm.of(tokenizer_with(CHATML), name)
    prompt = resolve(form, Segment(text="\nWhich is mined?"))
    chunks = [PromptChunk("", form.tokenize(text)) for text in CHUNKS]
    written = form.build(chunks, "\nWhich is mined?", bare=False)
    assert prompt.token_ids.to_list() == written.token_ids
    assert [(span.start, span.end) for span in prompt.chunks] == [
        (span.start, span.end) for span in written.spans
    ]


def test_a_question_of_token_ids_is_taken_as_it_is() -> None:
    form = PromptForm.of(tokenizer_with(CHATML))
    prompt = resolve(form, Segment(token_ids=TokenIds.of([7, 8, 9])))
    chunks = [token for text in CHUNKS for token in form.tokenize(text)]
    assert prompt.token_ids.to_list() == [*form.head, *chunks, 7, 8, 9]


def test_an_empty_question_stays_refused() -> None:
    form = PromptForm.of(tokenizer_with(CHATML))
    with pytest.raises(InvalidField, match="question"):
        resolve(form, Segment(text=""))

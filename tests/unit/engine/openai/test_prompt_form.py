"""Prompts that Kintsugi writes have the token ids of prompts that OpenAI clients send."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.registry import renderer_from_config

from kintsugi.core.plan import FormName, PromptChunk
from kintsugi.engine.openai.prompt import Segmented, SegmentTokenizer
from kintsugi.models import prompt_form
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.models.prompt_form import PromptForm, load_form
from tests.fakes.chat_templates import CHATML, DATED, DOCUMENTS, NO_SYSTEM, PARTS, write_tokenizer
from tests.fakes.random_models.factory import make_checkpoint_once

CHUNKS = ("Tea is made from leaves of a shrub.\n", "Salt is a mineral, and it is mined.\n")
QUESTION = "Which of them is made from leaves?"


class Served:
    """vLLM's own rendering of chat requests to the model in a folder, and our tokenising of it."""

    def __init__(self, folder: Path, prefix: Sequence[int]) -> None:
        self._model = ModelConfig(str(folder), dtype="float32")
        self._renderer = renderer_from_config(VllmConfig(model_config=self._model))
        self._tokenizer = SegmentTokenizer(self._renderer.get_tokenizer(), prefix)

    def segment(self, body: dict[str, Any], chunks: Sequence[str]) -> Segmented:
        request = ChatCompletionRequest.model_validate({"model": "m", **body})
        # As vLLM's `OnlineRenderer.preprocess_chat`.
        params = request.build_chat_params(None, "auto").with_defaults({"tools": None, "tokenize": False})
        _, prompt = self._renderer.render_messages(request.messages, params)
        special = request.build_tok_params(self._model).add_special_tokens
        return self._tokenizer.segment_text(prompt["prompt"], chunks, special)


def checkpoint(folder: Path, template: str, adds_bos: bool) -> Path:
    """A model whose tokenizer has the template."""
    shutil.copytree(make_checkpoint_once("tiny-llama"), folder)
    return write_tokenizer(folder, template, adds_bos)


def assert_as_served(form: PromptForm, folder: Path, chunks: Sequence[str], body: dict[str, Any]) -> None:
    prompt = form.build([PromptChunk("", form.tokenize(text)) for text in chunks], QUESTION)
    for prefix in (form.head, ()):  # an engine's chunk space may have another prefix
        served = Served(folder, prefix).segment(body, chunks)
        assert served.token_ids == prompt.token_ids
        assert served.spans == prompt.spans
    assert served.spans[0].start == len(form.head)


def messages(chunks: Sequence[str], *, system: str | None = None) -> list[dict[str, str]]:
    user = {"role": "user", "content": "".join(chunks) + "\n" + QUESTION}
    return [user] if system is None else [{"role": "system", "content": system}, user]


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM, PARTS, DOCUMENTS])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_chat_form_is_what_a_plain_openai_client_sends(
    template: str, adds_bos: bool, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model", template, adds_bos)
    assert_as_served(load_form(folder), folder, CHUNKS, {"messages": messages(CHUNKS)})


@pytest.mark.parametrize("template", [CHATML, PARTS])
def test_a_system_prompt_is_the_systems_message(template: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", template, False)
    form = load_form(folder, system="Be brief.")
    assert_as_served(form, folder, CHUNKS, {"messages": messages(CHUNKS, system="Be brief.")})


def test_the_documents_form_is_what_a_client_with_documents_sends(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", DOCUMENTS, True)
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "documents": [{"text": text} for text in CHUNKS],
    }
    assert_as_served(load_form(folder, FormName.DOCUMENTS), folder, CHUNKS, body)


def test_the_bundled_models_prompts_are_what_a_client_sends() -> None:
    assert_as_served(
        load_form(bundled_checkpoint()), bundled_checkpoint(), CHUNKS, {"messages": messages(CHUNKS)}
    )


def test_a_dated_template_is_served_with_todays_date(tmp_path: Path) -> None:
    """Only the date differs from what a client's prompt holds."""
    folder = checkpoint(tmp_path / "model", DATED, True)
    form = load_form(folder)
    prompt = form.build([PromptChunk("", form.tokenize(text)) for text in CHUNKS], QUESTION)
    served = Served(folder, form.head).segment({"messages": messages(CHUNKS)}, CHUNKS)
    ours, theirs = (form.tokenizer.decode(ids) for ids in (prompt.token_ids, served.token_ids))
    frozen = prompt_form.CLOCK.strftime("%d %b %Y")
    before, behind = ours.split(frozen)
    assert theirs.startswith(before)
    assert theirs.endswith(behind)
    assert frozen not in theirs

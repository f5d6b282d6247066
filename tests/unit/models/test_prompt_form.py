"""Prompts in the forms that models are served in, and templates that cannot write them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField, NotFound, Unavailable
from kintsugi.core.plan import FormName, PromptChunk
from kintsugi.models.bundled import bundled_checkpoint, showcase
from kintsugi.models.prompt_form import PromptForm, load_form, special_tokens
from tests.fakes.chat_templates import CHATML, DATED, DOCUMENTS, NO_SYSTEM, PARTS, tokenizer_with
from tests.fakes.random_models.vocabulary import BOS_ID

AUTO, CHAT, PLAIN = FormName.AUTO, FormName.CHAT, FormName.PLAIN


def shown(form: PromptForm, *texts: str, question: str = " Why? ", bare: bool = True) -> str:
    prompt = form.build([PromptChunk("", form.tokenize(text)) for text in texts], question, bare)
    for text, span in zip(texts, prompt.spans, strict=True):
        assert tuple(prompt.token_ids[span.start : span.end]) == form.tokenize(text)
    assert prompt.prefix == form.head
    return str(form.tokenizer.decode(prompt.token_ids))


def test_the_chat_form_puts_chunks_and_question_into_the_users_message() -> None:
    form = PromptForm.of(tokenizer_with(CHATML))
    assert form.name is CHAT
    system = "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
    assert shown(form, "Tea.\n", "Salt.") == (
        f"{system}<|im_start|>user\nTea.\nSalt.\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    told = PromptForm.of(tokenizer_with(CHATML), system="Be brief.")
    assert shown(told, "Tea.") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nTea.\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_question_that_is_a_whole_ending_is_left_as_it_is() -> None:
    assert shown(PromptForm.of(tokenizer_with(None)), "Tea.", question=" Q: x", bare=False) == "<s>Tea. Q: x"
    parts = PromptForm.of(tokenizer_with(PARTS))
    assert shown(parts, "Tea.", question=" Q: x", bare=False) == "<s>user: Tea. Q: x\nassistant:"


def test_a_model_without_a_template_is_asked_in_the_plain_form() -> None:
    form = PromptForm.of(tokenizer_with(None))
    assert form.name is PLAIN
    assert shown(form, "Tea.") == "<s>Tea.\nQuestion: Why?\nAnswer:"
    behind = PromptForm.of(tokenizer_with(None), system="Be brief. ")
    assert shown(behind, "Tea.") == "<s>Be brief. Tea.\nQuestion: Why?\nAnswer:"
    with pytest.raises(InvalidField, match=r"form: chat needs a chat template.*plain"):
        PromptForm.of(tokenizer_with(None), CHAT)


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_bos_is_written_only_where_the_tokenizer_adds_one(template: str | None) -> None:
    """Both have a `bos_token_id`, as SmolLM2, Qwen2 and Qwen3 have, whose tokenizers add none."""
    for adds_bos in (True, False):
        tokenizer = tokenizer_with(template, adds_bos)
        assert tokenizer.bos_token_id == BOS_ID
        assert PromptForm.of(tokenizer, PLAIN).head == ((BOS_ID,) if adds_bos else ())
        assert special_tokens(tokenizer) == ((BOS_ID,) if adds_bos else (), ())
        if template is not None:
            assert BOS_ID not in PromptForm.of(tokenizer).head, "the template writes none"


def test_the_head_is_the_same_every_day() -> None:
    form = PromptForm.of(tokenizer_with(DATED))
    assert form.tokenizer.decode(form.head) == "<s><|system|>\nToday: 26 Jul 2024\n<|user|>\n"
    assert form.head[0] == BOS_ID


def test_a_template_of_parts_is_given_parts() -> None:
    form = PromptForm.of(tokenizer_with(PARTS), system="Be brief.")
    assert shown(form, "Tea.") == "<s>system: Be brief.\nuser: Tea.\nWhy?\nassistant:"


def test_documents_stand_where_the_template_writes_them() -> None:
    form = PromptForm.of(tokenizer_with(DOCUMENTS), FormName.DOCUMENTS)
    assert shown(form, "Tea.", "Salt.") == (
        "<s><document 1>\nTea.\n</document>\n<document 2>\nSalt.\n</document>\n<user>Why?</><assistant>"
    )
    assert PromptForm.of(tokenizer_with(DOCUMENTS)).name is CHAT, "unless documents are asked for"


@pytest.mark.parametrize(
    ("template", "name", "system", "problem"),
    [
        ("{{ messages[0].content.no.thing }}", AUTO, None, r"form: the model's chat template fails .*plain"),
        ("{% for", AUTO, None, r"form: .* fails"),
        ("{{ bos_token }}", AUTO, None, "form: .* a user's message once and unchanged.*plain"),
        (
            "{{ messages | tojson }}",
            AUTO,
            None,
            "form: .* a user's message once and unchanged",
        ),
        ("{% for m in messages * 2 %}{{ m.content }}{% endfor %}", AUTO, None, "form: .* once and unchanged"),
        (NO_SYSTEM, AUTO, "Be brief.", r"system: is refused .*System role not supported.*plain"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            AUTO,
            "Be brief.",
            "system: is dropped",
        ),
        (CHATML, FormName.DOCUMENTS, None, "form: .* does not write documents unchanged.*chat"),
        (
            "{{ messages[-1].content }}{% for d in documents %}{{ d.text }}{% endfor %}",
            FormName.DOCUMENTS,
            None,
            "form: .* does not write documents unchanged before the question",
        ),
    ],
)
def test_a_template_that_cannot_write_the_form_is_explained(
    template: str, name: FormName, system: str | None, problem: str
) -> None:
    with pytest.raises(InvalidField, match=problem):
        PromptForm.of(tokenizer_with(template), name, system)


def test_a_head_that_depends_on_the_number_of_documents_is_refused() -> None:
    counted = "{{ (documents or []) | length }}" + DOCUMENTS
    form = PromptForm.of(tokenizer_with(counted), FormName.DOCUMENTS)
    assert shown(form, "Tea.").startswith("1<s><document 1>")
    with pytest.raises(InvalidField, match="depends on their number"):
        shown(form, "Tea.", "Salt.")


def test_nothing_to_ask_is_refused() -> None:
    for bare in (True, False):
        with pytest.raises(InvalidField, match="question: is empty"):
            shown(PromptForm.of(tokenizer_with(CHATML)), "Tea.", question=" \n", bare=bare)


def test_the_bundled_model_is_asked_in_the_form_it_was_trained_on() -> None:
    form, show = load_form(bundled_checkpoint()), showcase()
    assert (form.name, form.foot) == (CHAT, "")
    assert form.head == (form.tokenizer.bos_token_id,)
    text = form.tokenizer.decode(form.head) + "".join(show.chunks) + show.question
    assert shown(form, *show.chunks, question=show.question, bare=False) == text
    assert (load_form(bundled_checkpoint(), PLAIN).head, form.foot) == (form.head, "")


def test_a_tokenizer_that_cannot_be_read_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFound, match="check the name"):
        load_form(tmp_path)
    without: Any = None
    monkeypatch.setitem(sys.modules, "transformers", without)
    with pytest.raises(Unavailable, match="pip install transformers"):
        load_form(tmp_path)

"""Writes prompts in the form in which they are served: a head, the chunks, the question, a foot.

Commands, calibration, precompute, engines and the gateway all use this code. So calibration measures prompts
like those of clients, and all parts agree on the prefix of chunks. In the forms that use a chat template, a
prompt has the token ids that vLLM renders for an OpenAI client that sends one user message, with each chunk
tokenised alone (`engine.openai.prompt`). The template writes the special tokens; in the plain form the
tokenizer adds its own, such as a BOS, if it has any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kintsugi.core.errors import InvalidField, NotFound, Unavailable
from kintsugi.core.plan import FormName, PromptChunk, RagPrompt
from kintsugi.models.reference import resolve_model
from kintsugi.models.texts import read_user_text

CLOCK = datetime(2024, 7, 26)
"""The time that templates get as the current time. With the real date in the head, every stored chunk would
become a miss at midnight. This is the default date of Llama 3's template."""
NO_ARGS: Mapping[str, Any] = MappingProxyType({})
REASON_CHARS_MAX = 200
"""Maximum length of a template's error in our message."""
_LETTER = "a"
"""Text that is tokenised to find the special tokens that the tokenizer adds."""
_QUESTION = 'Which "<probe>" & why?\n(Kintsugi asks.)'
"""Placeholder of the user's message while a template is rendered. A template that escapes texts changes
it."""
_DOCUMENT = 'The "<probe>" & document {}.\n(Kintsugi.)'


@dataclass(frozen=True)
class PromptForm:
    """One way to write prompts for one model. Create it with `of` or `load_form`."""

    name: FormName
    """`CHAT`, `DOCUMENTS` or `PLAIN`."""
    head: tuple[int, ...]
    """Token ids of everything before the first chunk: special tokens, system prompt, start of the turn."""
    foot: str
    """Text after the question: end of the user's turn and start of the assistant's. It is tokenised together
    with the question."""
    tokenizer: Any = field(repr=False, compare=False)
    """A tokenizer of transformers."""
    system: str | None = None
    """The system prompt; None: the template's own, if it has one."""

    @staticmethod
    def of(tokenizer: Any, name: FormName = FormName.AUTO, system: str | None = None) -> PromptForm:
        """Return the form `name` of a model. Raises `InvalidField` if the model's template cannot write the
        form or drops the system prompt."""
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if name is FormName.AUTO:
            name = FormName.CHAT if has_template else FormName.PLAIN
        if name is FormName.PLAIN:
            before, _ = special_tokens(tokenizer)
            head = (*before, *_ids(tokenizer, system)) if system else before
            return PromptForm(name, head, "", tokenizer, system)
        if not has_template:
            raise InvalidField("form", f"{name} needs a chat template, and this model has none; use plain")
        count = 1 if name is FormName.DOCUMENTS else 0
        pieces = _render_pieces(tokenizer, None, count)
        if system is not None:
            pieces = _render_pieces(tokenizer, system, count)
        if system is not None and system.strip() not in pieces[0]:
            raise InvalidField(
                "system", "is dropped by the model's chat template; leave it out, or use the form plain"
            )
        return PromptForm(name, _ids(tokenizer, pieces[0]), pieces[-1], tokenizer, system)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Tokenise a chunk, or the end of a prompt, alone."""
        return _ids(self.tokenizer, text)

    def build(self, chunks: Sequence[PromptChunk], question: str, bare: bool = True) -> RagPrompt:
        """Write the prompt. The form adds text to a ``bare`` question; any other question is the whole text
        between the last chunk and the foot.

        Raises `InvalidField` for an empty question, and if the template writes another head for this number
        of documents.
        """
        if not question.strip():
            raise InvalidField("question", "is empty; ask something about the chunks")
        ending = self._phrase(question.strip()) if bare else question
        if self.name is FormName.DOCUMENTS:
            head, *separators, opening, _ = _render_pieces(self.tokenizer, self.system, len(chunks))
            if self.tokenize(head) != self.head:
                raise InvalidField(
                    "form", "documents: the template's beginning depends on their number; use the form chat"
                )
            separator_ids = [(), *map(self.tokenize, separators)]
            chunks = [replace(chunk, separator=ids) for chunk, ids in zip(chunks, separator_ids, strict=True)]
            ending = opening + ending
        return RagPrompt(self.head, tuple(chunks), self.tokenize(ending + self.foot))

    def _phrase(self, question: str) -> str:
        if self.name is FormName.PLAIN:
            return f"\nQuestion: {question}\nAnswer:"
        # The question follows the last chunk, which may not end with a line break.
        return f"\n{question}" if self.name is FormName.CHAT else question


def load_form(
    model: str | Path,
    name: FormName = FormName.AUTO,
    system: str | None = None,
    vllm_args: Mapping[str, Any] = NO_ARGS,
) -> PromptForm:
    """Return the form of a checkpoint folder or a hub name, for engines with these arguments.

    The head of the form `AUTO` is the default prefix of chunks in engines, precompute and calibration. Raises
    as `load_tokenizer` and `PromptForm.of` do.
    """
    return PromptForm.of(load_tokenizer(model, vllm_args), name, system)


def load_form_behind(
    model: str, name: FormName, system: Path | None, vllm_args: Mapping[str, Any] = NO_ARGS
) -> PromptForm:
    """Return the model's form with the system prompt from a file. None: the template's own, if it has one.

    Raises `NotFound` for a missing model, and as `read_user_text` and `PromptForm.of` do.
    """
    text = None
    if system is not None:
        text = read_user_text(system, "system", "a text file with the system prompt")
    return load_form(model, name, text, vllm_args)


def load_tokenizer(model: str | Path, vllm_args: Mapping[str, Any] = NO_ARGS) -> Any:
    """Return the tokenizer of a model: a checkpoint folder, a hub name or the reference model. Only the
    arguments `revision` and `trust_remote_code` of vLLM are used. Raises `NotFound`, `Unavailable` without
    transformers, and as `reference.fetch_model` does."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise Unavailable(f"tokenizers need transformers ({error}); pip install transformers") from error
    folder = resolve_model(model)
    try:
        return AutoTokenizer.from_pretrained(
            folder,
            revision=vllm_args.get("revision") or "main",
            trust_remote_code=bool(vllm_args.get("trust_remote_code")),
        )
    except Exception as error:
        # The libraries raise many types of errors for files that they cannot read.
        raise NotFound(
            f"{model} is neither a checkpoint folder nor a model that can be downloaded, or has no tokenizer "
            f"({type(error).__name__}); check the name"
        ) from error


def special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the tokenizer adds before and after a plain text."""
    plain, full = _ids(tokenizer, _LETTER), tuple(tokenizer(_LETTER, add_special_tokens=True).input_ids)
    start = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), len(full))
    return full[:start], full[start + len(plain) :]


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def _render_pieces(tokenizer: Any, system: str | None, documents: int) -> list[str]:
    """Return the ``documents`` + 2 texts that the template writes before, between and after the documents and
    the user's message. Raises `InvalidField`."""
    texts = [*(_DOCUMENT.format(number) for number in range(1, documents + 1)), _QUESTION]
    try:
        return _cut(_render(tokenizer, system, texts, as_parts=False), texts)
    except InvalidField as error:
        # Like vLLM, pass lists of parts to a template that iterates over a message's content.
        with suppress(InvalidField):
            return _cut(_render(tokenizer, system, texts, as_parts=True), texts)
        raise error from error.__cause__


def _render(tokenizer: Any, system: str | None, texts: Sequence[str], as_parts: bool) -> str:
    *documents, question = texts

    def message(role: str, text: str) -> Mapping[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}

    messages = [message("system", system)] if system is not None else []
    try:
        rendered: str = tokenizer.apply_chat_template(
            [*messages, message("user", question)],
            documents=[{"text": text} for text in documents] or None,
            tokenize=False,
            add_generation_prompt=True,
            strftime_now=CLOCK.strftime,
        )
    except Exception as error:
        # A template may raise any type of error: it calls methods of its inputs.
        reason = " ".join(str(error).split())[:REASON_CHARS_MAX] or type(error).__name__
        if system is None:
            problem = f"the model's chat template fails ({reason}); use the form plain"
            raise InvalidField("form", problem) from error
        problem = f"is refused by the model's chat template ({reason}); leave it out, or use the form plain"
        raise InvalidField("system", problem) from error
    return rendered


def _cut(rendered: str, texts: Sequence[str]) -> list[str]:
    """Return the pieces around the texts. Each text must occur once, in order. Raises `InvalidField`."""
    pieces = []
    for text in texts:
        before, found, rendered = rendered.partition(text)
        if not found or text in rendered:
            problem = "does not write a user's message once and unchanged; use the form plain"
            if len(texts) > 1:
                problem = "does not write documents unchanged before the question; use the form chat"
            raise InvalidField("form", f"the model's chat template {problem}")
        pieces.append(before)
    return [*pieces, rendered]

"""Turns the JSON of an OpenAI request into a call to the engine. Pure.

It removes the field `kintsugi` (constraints of the blend) and the marks of chunks in content parts, and finds
known chunk texts in messages, instructions, input and prompt. vLLM validates all other fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, OpenAICall
from kintsugi.core.namespaces import NARROWING_FIELDS
from kintsugi.core.request import PARAMS_KEY, SPANS_MAX, KintsugiParams, Op, check_priority
from kintsugi.core.schema import check_number, check_whole
from kintsugi.core.spaces import check_namespace

SEARCHED_CHARS_MAX = 1 << 21
"""Maximum length of the text that is searched for known chunks; it exceeds any model's context."""
ANSWERS_MAX = 256
"""Maximum number of answers, `n` times the prompts: each is a request in the engine, and all start at
once."""
DOCUMENT_TEXT_KEYS = ("text", "contents", "content")

WHOLE_MAX = (1 << 31) - 1
SEED_MAX = (1 << 63) - 1
ANSWER_LIMITS = {
    CHAT_PATH: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS_PATH: ("max_tokens",),
    RESPONSES_PATH: ("max_output_tokens",),
}
"""Fields that limit the length of an answer; the first one that is set applies."""
_WHOLE_FIELDS = ("seed", "top_k", "min_tokens", "top_logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_NUMBER_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "length_penalty",
)
"""Fields of sampling, of which vLLM would convert `true` and texts."""
PROMPT_FIELDS = {
    CHAT_PATH: ("messages", "documents"),
    COMPLETIONS_PATH: ("prompt",),
    RESPONSES_PATH: ("instructions", "input"),
}
"""Fields of a body that make up its prompt, in the prompt's order."""
_FIELDS_WITHIN = ("content", "text", "contents", "output", "input", "arguments", "summary")
"""Fields with texts in messages, items, their parts and tool results."""
CHARS_PER_TOKEN = 4
"""Approximate, for English text: a prompt's length is estimated before tokenisation."""
_SEARCHED_FIELDS = {CHAT_PATH: "messages", COMPLETIONS_PATH: "prompt", RESPONSES_PATH: "input"}
_TEXT_FIELDS = ("content", "output")
"""Fields of a message or item that hold its text or its parts; `output` is a tool's result."""

Finder = Callable[[str], Sequence[tuple[int, int]]]
"""Finds known chunks in a text: `[start, end)` in characters."""

_RESERVED = {
    "kv_transfer_params": "is set by the gateway; set blend options in `kintsugi`",
}

_KEPT = {
    "background": "is not supported, because answers are not stored; omit it and wait for the answer",
    "conversation": "is not stored here; send the whole conversation in `input`",
    "previous_response_id": "names an answer, but none is stored; send the whole conversation in `input`",
    "previous_input_messages": "are only supported for one kind of model; send the whole conversation",
}
"""Fields of a request to `RESPONSES_PATH` that need a stored answer. vLLM's storage of answers has no bound
and no namespaces."""

_GATEWAYS_OWN = ("shared", "chunk_tokens_multiple", "discover", "trial")
"""Parameters that the gateway and the engine set themselves."""


@dataclass
class _Chunks:
    """Chunk texts, without duplicates, in the order of the prompt."""

    find: Finder
    where: str
    """The body's field with the prompt, for errors."""
    texts: dict[str, None] = field(default_factory=dict)
    searched_chars: int = 0

    def mark(self, text: str, where: str) -> None:
        if not text:
            raise InvalidField(where, "is an empty chunk; leave it out")
        self.texts[text] = None
        if len(self.texts) > SPANS_MAX:
            raise InvalidField(where, f"more than {SPANS_MAX} chunks; send fewer or longer ones")

    def search(self, text: str) -> None:
        self.searched_chars += len(text)
        if self.searched_chars <= SEARCHED_CHARS_MAX:
            for start, end in self.find(text):
                self.mark(text[start:end], self.where)


def parse_openai_call(
    request_id: str,
    path: str,
    body: Mapping[str, Any],
    namespace: str,
    find: Finder,
    trace: Mapping[str, str] | None = None,
) -> OpenAICall:
    """Parse the JSON object of an OpenAI request; ``body`` is not changed.

    Raises `InvalidField` for invalid fields of ours. Malformed messages are passed to vLLM.
    """
    for name, problem in _RESERVED.items():
        if body.get(name) is not None:
            raise InvalidField(name, problem)
    _check_answers(body)
    for name in (*ANSWER_LIMITS[path], "priority"):
        _check_whole(body, name)
    _check_sampling(path, body)
    if body.get("priority") is not None:
        check_priority(body["priority"])
    if body.get("use_beam_search") not in (None, False):
        # vLLM's beam search sends the engine a request for every token of every beam, without our parameters:
        # these requests would neither be blended nor be accounted for.
        raise InvalidField("use_beam_search", "is not supported; omit it, or sample `n` answers")
    params = _params_of(body.get(PARAMS_KEY), namespace)
    dropped = (PARAMS_KEY, *_RESERVED, *NARROWING_FIELDS)
    passed = {name: value for name, value in body.items() if name not in dropped}
    chunks = _Chunks(find, _SEARCHED_FIELDS[path])
    _take_chunks(path, passed, chunks)
    return OpenAICall(request_id, path, passed, params, tuple(chunks.texts), dict(trace or {}))


def _take_chunks(path: str, body: dict[str, Any], chunks: _Chunks) -> None:
    """Find the chunks in a body, and remove their marks. Raises `InvalidField`, also for fields that need a
    stored answer."""
    if path == CHAT_PATH:
        if body.get("documents") is not None:
            body["documents"] = _documents(body["documents"], chunks)
        body["messages"] = _items(body.get("messages"), chunks)
        return
    if body.get("documents") is not None:
        raise InvalidField("documents", f"belong to {CHAT_PATH}; put their texts into the {chunks.where}")
    if path == COMPLETIONS_PATH:
        for text in _texts(body.get("prompt")):
            chunks.search(text)
        return
    for name, problem in _KEPT.items():
        if body.pop(name, None):
            raise InvalidField(name, problem)
    for text in _texts([body.get("instructions"), body.get("input")]):
        chunks.search(text)
    body["input"] = _items(body.get("input"), chunks)


def _check_answers(body: Mapping[str, Any]) -> None:
    """Raise `InvalidField` for more than `ANSWERS_MAX` answers, or an `n` of another type, which vLLM would
    convert. vLLM refuses a prompt of another type."""
    _check_whole(body, "n")
    n, prompt = body.get("n"), body.get("prompt")
    each = 1 if n is None else n
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    if each * prompts > ANSWERS_MAX:
        raise InvalidField(
            "prompt" if prompts > 1 else "n",
            f"{each * prompts} answers; at most {ANSWERS_MAX} are allowed: request fewer",
        )


def _check_sampling(path: str, body: Mapping[str, Any]) -> None:
    """Raise `InvalidField` for a number or token id of another type, such as `true`."""
    for name in (*_WHOLE_FIELDS, *(("logprobs",) if path == COMPLETIONS_PATH else ())):
        _check_whole(body, name, SEED_MAX)
    for name in _NUMBER_FIELDS:
        if body.get(name) is not None:
            check_number(body[name], name)
    prompt = body.get("prompt")
    for one in prompt if isinstance(prompt, list) else ():
        if any(isinstance(token_id, bool) for token_id in (one if isinstance(one, list) else (one,))):
            raise InvalidField("prompt", "has true or false among its token ids")


def _check_whole(body: Mapping[str, Any], name: str, maximum: int = WHOLE_MAX) -> None:
    """Raise `InvalidField` for another type, which vLLM would convert, or a number that it could not
    hold."""
    if body.get(name) is not None:
        check_whole(body[name], name, -maximum, maximum)


def find_requested_namespace(body: Mapping[str, Any], header: str | None) -> str | None:
    """Return the namespace in the header or in `kintsugi`. Raises `InvalidField` if they differ."""
    extension = body.get(PARAMS_KEY)
    named = extension.get("namespace") if isinstance(extension, Mapping) else None
    if named is not None and not isinstance(named, str):
        raise InvalidField(f"{PARAMS_KEY}.namespace", "must be a string")
    if named:
        try:
            check_namespace(named)
        except InvalidField as error:
            raise error.within(PARAMS_KEY) from None
    if named and header and named != header:
        raise InvalidField(f"{PARAMS_KEY}.namespace", f"{named!r} is not the header's {header!r}; send one")
    return named or header


def _params_of(extension: Any, namespace: str) -> KintsugiParams:
    if extension is None:
        return KintsugiParams(namespace)
    if not isinstance(extension, Mapping):
        raise InvalidField(PARAMS_KEY, 'must be an object such as {"ratio": 0.15}')
    if "spans" in extension:
        raise InvalidField(f"{PARAMS_KEY}.spans", "are found by the gateway; mark chunks in content parts")
    for name in _GATEWAYS_OWN:
        if name in extension:
            raise InvalidField(f"{PARAMS_KEY}.{name}", "is set by the gateway; leave it out")
    for op, user in ((Op.SAVE, "PutChunk"), (Op.AUDIT, "the engine")):
        if extension.get("op") == op:
            raise InvalidField(f"{PARAMS_KEY}.op", f"{op.value} belongs to {user}; use blend or off")
    return KintsugiParams.from_mapping({**extension, "namespace": namespace})


def _items(items: Any, chunks: _Chunks) -> Any:
    """Return messages or items of `input` without the marks of chunks. Search their texts and their tools'
    results."""
    if not isinstance(items, list):
        return items
    passed = []
    for index, item in enumerate(items):
        for name in _TEXT_FIELDS if isinstance(item, Mapping) else ():
            content = item.get(name)
            if isinstance(content, str):
                chunks.search(content)
            elif isinstance(content, list):
                where = f"{chunks.where}[{index}].{name}"
                parts = [_part(part, f"{where}[{at}]", chunks) for at, part in enumerate(content)]
                item = {**item, name: parts}
        passed.append(item)
    return passed


def _part(part: Any, where: str, chunks: _Chunks) -> Any:
    if not isinstance(part, Mapping):
        return part
    text, mark = part.get("text"), part.get(PARAMS_KEY)
    if mark is None:
        if isinstance(text, str):
            chunks.search(text)
        return part
    if not isinstance(mark, Mapping) or set(mark) != {"chunk"} or not isinstance(mark["chunk"], bool):
        raise InvalidField(f"{where}.{PARAMS_KEY}", 'must be {"chunk": true}')
    if not isinstance(text, str):
        raise InvalidField(f"{where}.text", "must be the chunk's text")
    if mark["chunk"]:
        chunks.mark(text, f"{where}.text")
    return {name: value for name, value in part.items() if name != PARAMS_KEY}


def _documents(documents: Any, chunks: _Chunks) -> list[dict[str, str]]:
    """Return the documents as vLLM passes them to a chat template: mappings of strings, each with a
    `text`."""
    if not isinstance(documents, list):
        raise InvalidField("documents", 'must be a list of texts, or of objects such as {"text": "…"}')
    passed = []
    for index, document in enumerate(documents):
        where = f"documents[{index}]"
        if isinstance(document, str):
            document = {"text": document}
        if not isinstance(document, Mapping) or not all(isinstance(v, str) for v in document.values()):
            raise InvalidField(where, 'must be a text, or an object of strings such as {"text": "…"}')
        text = next((document[name] for name in DOCUMENT_TEXT_KEYS if name in document), None)
        if text is None:
            raise InvalidField(where, f"must have one of {', '.join(DOCUMENT_TEXT_KEYS)}")
        chunks.mark(text, where)
        passed.append({**document, "text": text})
    return passed


def _texts(prompt: Any) -> Iterator[str]:
    """Yield the prompt's texts, and skip token ids: the engine finds chunks in token ids itself."""
    for one in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(one, str):
            yield one


def find_prompt_texts(path: str, body: Mapping[str, Any]) -> Iterator[str | int]:
    """Yield the texts of a request's prompts, and the token ids among them, in order. Oddities, which the
    engine refuses, are skipped."""
    return _find_texts([body.get(name) for name in PROMPT_FIELDS[path]])


def _find_texts(content: Any) -> Iterator[str | int]:
    if isinstance(content, str | int):
        yield content
    elif isinstance(content, list):
        yield from (text for one in content for text in _find_texts(one))
    elif isinstance(content, Mapping):
        yield from (text for name in _FIELDS_WITHIN for text in _find_texts(content.get(name)))

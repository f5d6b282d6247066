"""OpenTelemetry's attributes for generative AI (`gen_ai.*`), as backends for traces read them. Pure.

Names are those of the semantic conventions for GenAI spans. Texts of prompts and answers are never recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kintsugi.core.accounting import Outcome
from kintsugi.core.exchange import CHAT_PATH, RESPONSES_PATH, Usage

Attribute = str | int | float | bool | Sequence[str]

PROVIDER = "kintsugi"
CHAT, COMPLETION = "chat", "text_completion"
"""`gen_ai.operation.name`."""
_REQUEST = {
    "model": (str, "gen_ai.request.model"),
    "max_tokens": (int, "gen_ai.request.max_tokens"),
    "max_completion_tokens": (int, "gen_ai.request.max_tokens"),
    "max_output_tokens": (int, "gen_ai.request.max_tokens"),
    "n": (int, "gen_ai.request.choice.count"),
    "seed": (int, "gen_ai.request.seed"),
    "stream": (bool, "gen_ai.request.stream"),
    "temperature": (float, "gen_ai.request.temperature"),
    "top_p": (float, "gen_ai.request.top_p"),
    "top_k": (int, "gen_ai.request.top_k"),
    "frequency_penalty": (float, "gen_ai.request.frequency_penalty"),
    "presence_penalty": (float, "gen_ai.request.presence_penalty"),
}
"""Fields of OpenAI's body, and of vLLM's sampling parameters, with their types."""


def describe_request(path: str, asked: Mapping[str, Any]) -> dict[str, Attribute]:
    """The attributes of a request: ``path`` is OpenAI's or an RPC's name, ``asked`` its body or sampling
    parameters. Values of another type, which the engine refuses, are left out."""
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": CHAT if path in (CHAT_PATH, RESPONSES_PATH) else COMPLETION,
        "gen_ai.provider.name": PROVIDER,
    }
    for field, (kind, name) in _REQUEST.items():
        value: Any = asked.get(field)
        if type(value) is int and kind is float:
            value = float(value)
        has_kind: bool = type(value) is kind
        if has_kind and value != "":
            found[name] = value
    return found


def describe_answer(
    usage: Usage | None, model: str | None, response_id: str, finish_reasons: Sequence[str]
) -> dict[str, Attribute]:
    """The attributes of an answer, as far as the engine told of it."""
    found: dict[str, Attribute] = {"gen_ai.response.id": response_id}
    if model:
        found["gen_ai.response.model"] = model
    if finish_reasons:
        found["gen_ai.response.finish_reasons"] = tuple(finish_reasons)
    if usage is not None:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    return found


def count_cached(reported: int, accounting: Mapping[str, Any]) -> int:
    """How many of a prompt's tokens came from a cache: from vLLM's own, or from a stored chunk.

    vLLM reports what it did not compute itself, and of a blended prompt that is all but the last token. The
    question and the missed chunks are among those, and the blend computed them.
    """
    if accounting.get("outcome") != Outcome.BLENDED.value:
        return reported
    found = (accounting.get(name, 0) for name in ("tokens_prefix_cached", "tokens_hit"))
    return min(reported, sum(count for count in found if isinstance(count, int)))

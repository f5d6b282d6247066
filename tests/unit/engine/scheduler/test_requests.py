"""Which requests are prefilled in full, whatever the store holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kintsugi.core.errors import NotBlendable
from kintsugi.engine.scheduler.requests import check_request
from tests.conftest import Supports


def request_with(**changes: Any) -> Any:
    """A stand-in for vLLM's request for a prompt of ten tokens."""
    plain = {
        "lora_request": None,
        "mm_features": [],
        "prompt_token_ids": list(range(10)),
        "prompt_embeds": None,
        "num_prompt_tokens": 10,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**{**plain, **changes})


def test_a_prompt_with_an_image_is_prefilled_in_full(supports: Supports) -> None:
    with pytest.raises(NotBlendable, match=r"^multimodal: .*send text alone to blend"):
        check_request(request_with(mm_features=[object()]), None)
    supports("every", "multimodal", "declined")


def test_a_prompt_of_text_alone_can_be_blended() -> None:
    check_request(request_with(), None)
    check_request(request_with(), 10)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_request": object()}, "lora"),
        ({"prompt_token_ids": None}, "prompt_embeds"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"num_prompt_tokens": 11}, "attention_chunk"),
        ({"skip_reading_prefix_cache": True}, "prompt_logprobs"),
    ],
)
def test_what_a_prompt_needs_beside_its_token_ids_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotBlendable) as raised:
        check_request(request_with(**changes), 10)
    assert raised.value.reason == reason

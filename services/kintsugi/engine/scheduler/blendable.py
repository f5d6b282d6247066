"""Which requests cannot be blended, whatever the store holds."""

from __future__ import annotations

from vllm.v1.request import Request

from kintsugi.core.errors import NotBlendable
from kintsugi.models.layers import DeclineReason


def check_request(request: Request, local_chunk: int | None) -> None:
    """Raise `NotBlendable` for a request that needs more than KV of token ids, or is too long for layers that
    attend within `local_chunk` positions. Beyond them, tokens of one chunk can stand on both sides of a
    border, and see less than where the chunk was prefilled."""
    if request.lora_request is not None:
        raise NotBlendable("lora", "chunk KV belongs to the base model")
    if request.mm_features:
        raise NotBlendable(
            DeclineReason.MULTIMODAL.value,
            "the prompt has inputs beside text, and chunk KV is over token ids; send text alone to blend",
        )
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        raise NotBlendable("prompt_embeds", "chunk KV is over token ids alone")
    if local_chunk is not None and request.num_prompt_tokens > local_chunk:
        raise NotBlendable(
            "attention_chunk",
            f"{request.num_prompt_tokens} tokens are more than the {local_chunk} within which this model's "
            "layers attend; send shorter prompts to blend",
        )
    if request.skip_reading_prefix_cache:
        raise NotBlendable("prompt_logprobs", "logprobs of prompt tokens need their full prefill")

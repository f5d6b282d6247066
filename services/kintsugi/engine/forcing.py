"""Teacher forcing: a request that answers with given tokens and reports the model's own logprobs.

A custom logits processor for vLLM. Raw logprobs are taken before processors run, so they are the model's
distributions after the forced tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from kintsugi.engine.local import FORCED_KEY


class TeacherForcing(AdapterLogitsProcessor):  # type: ignore[misc]
    """Logits processor for requests with `FORCED_KEY`. Ignores all others."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        forced = (params.extra_args or {}).get(FORCED_KEY)
        return None if forced is None else _Forced(forced)


class _Forced:
    """Forces one request's tokens in order; after the last one, the model continues freely."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        if len(output_ids) >= len(self._token_ids):
            return logits
        only = torch.full_like(logits, float("-inf"))
        only[self._token_ids[len(output_ids)]] = 0.0
        return only

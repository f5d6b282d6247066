"""Teacher forcing: a request that answers with given tokens and reports the model's own logprobs.

A custom logits processor of vLLM's. Raw logprobs are taken before processors run, so the distributions
are those of the model behind the forced tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from kintsugi.engine.local import FORCED_KEY


class TeacherForcing(AdapterLogitsProcessor):  # type: ignore[misc]
    """Leaves requests without `FORCED_KEY` alone."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        forced = (params.extra_args or {}).get(FORCED_KEY)
        return None if forced is None else _Forced(forced)


class _Forced:
    """Forces one request's tokens in order, and nothing once they are used up."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        if len(output_ids) >= len(self._token_ids):
            return logits
        only = torch.full_like(logits, float("-inf"))
        only[self._token_ids[len(output_ids)]] = 0.0
        return only

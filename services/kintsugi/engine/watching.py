"""Counts the requests of an engine's client, gRPC's and OpenAI's, and shows some answers to a watcher.

A sampled request asks vLLM for logprobs that its caller does not see: vLLM's handlers return only what the
caller's own request asks for.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from kintsugi.core.accounting import WEIGHTS_CHANGED
from kintsugi.core.request import OPTION_NAMES, PARAMS_KEY, KintsugiParams, Op
from kintsugi.engine.load import LoadMeter
from kintsugi.engine.local import Generation, Prompt, tokens_prompt

RAW = "raw_logprobs"
"""vLLM's default `logprobs_mode`."""


class Watcher(Protocol):
    """What `quality.shadow.Shadow` does for this module."""

    def prepare_prompt(self, request_id: str, prompt: Prompt) -> Prompt: ...

    def take(self, prompt: Prompt, generation: Generation) -> bool: ...


class WatchedClient:
    """A `vllm.v1.engine.async_llm.AsyncLLM` that counts its requests and shows them to a watcher, if any."""

    def __init__(self, client: Any, load: LoadMeter) -> None:
        self.watcher: Watcher | None = None
        self.weights_changed: str | None = None
        """The reason that answers give once the worker has found other weights; None before."""
        self._client = client
        self._load = load
        self._logprobs_max = _logprobs_max(client.model_config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """As vLLM's. Closing it ends the work in the engine."""
        watcher = self.watcher
        # Callers choose their request's id, and must not choose with it whether they are sampled.
        ticket = "" if watcher is None else uuid.uuid4().hex
        asked = None if watcher is None else self._prepare_blend(watcher, prompt, sampling, ticket)
        if asked is not None:
            sampling.logprobs = asked.top_logprobs
        first: dict[int, float] = {}
        self._load.record_start(request_id, len(prompt.get("prompt_token_ids") or ()))
        try:
            async with aclosing(self._client.generate(prompt, sampling, request_id, **more)) as outputs:
                async for output in outputs:
                    self._load.record_first_token(request_id)
                    if watcher is not None and asked is not None:
                        first = first or _first_logprobs(output, asked.top_logprobs)
                    accounting = None
                    if output.finished:
                        accounting = (output.kv_transfer_params or {}).get(PARAMS_KEY)
                        self._note_reason(accounting)
                    if watcher is not None and asked is not None and output.finished and first:
                        watcher.take(asked, _generation(output, first, accounting))
                    yield output
        finally:
            self._load.record_end(request_id)

    def _note_reason(self, accounting: dict[str, Any] | None) -> None:
        reason = str((accounting or {}).get("reason") or "")
        if reason.startswith(f"{WEIGHTS_CHANGED}:"):
            self.weights_changed = reason

    def _prepare_blend(self, watcher: Watcher, prompt: Any, sampling: Any, ticket: str) -> Prompt | None:
        """The prompt as the watcher wants it, None for a request that it does not sample.

        Never sampled are requests that choose their own blend options, of which calibration says nothing,
        that want other logprobs, or whose answer follows a grammar: vLLM masks logits with it before it takes
        their logprobs.
        """
        asked = (sampling.extra_args or {}).get("kv_transfer_params") or {}
        params = asked.get(PARAMS_KEY)
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if params is None or params["op"] != Op.BLEND or not token_ids or sampling.n != 1:
            return None
        if any(params.get(name) is not None for name in OPTION_NAMES):
            return None
        if sampling.logprobs is not None or sampling.logprob_token_ids or sampling.structured_outputs:
            return None
        plain = Prompt(token_ids, KintsugiParams(params["namespace"]))
        marked = watcher.prepare_prompt(ticket, plain)
        return marked if 0 < marked.top_logprobs <= self._logprobs_max else None


def _logprobs_max(model_config: Any) -> int:
    """How many logprobs a request may ask for; 0 where vLLM reports other values than the model's own."""
    if model_config.logprobs_mode != RAW:
        return 0
    known = int(model_config.max_logprobs)
    return known if known >= 0 else int(model_config.get_vocab_size())


def _generation(output: Any, first: dict[int, float], accounting: dict[str, Any] | None) -> Generation:
    """An answer reduced to its first position, which does not depend on the drawn token."""
    best = max(first, key=lambda token: first[token])
    return Generation(
        token_ids=[best],
        text="",
        ttft_s=float("nan"),
        itl_s=[],
        logprobs=[first[best]],
        top_logprobs=[first],
        finish_reason=output.outputs[0].finish_reason,
        num_cached_tokens=output.num_cached_tokens or 0,
        accounting=accounting,
    )


def _first_logprobs(output: Any, limit: int) -> dict[int, float]:
    positions = output.outputs[0].logprobs
    if not positions or positions[0] is None:
        return {}
    found = {int(token): float(entry.logprob) for token, entry in positions[0].items()}
    # vLLM also reports the drawn token where it is not among the best.
    best = sorted(found, key=lambda token: -found[token])[:limit]
    return {token: found[token] for token in best}


async def prefill_in_full(client: Any, prompt: Prompt, request_id: str, priority: int) -> Generation:
    """The first position of a full prefill, without blending and without the prefix cache."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=prompt.top_logprobs,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True,
    )
    answering = client.generate(tokens_prompt(prompt), sampling, request_id, priority=priority)
    async with aclosing(answering) as outputs:
        async for output in outputs:
            if output.finished:
                return _generation(output, _first_logprobs(output, prompt.top_logprobs), None)
    raise AssertionError("vLLM ends an answer, or raises")

"""Runs tiny engines of one architecture, with and without the plugin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.support.architectures.catalogue import Architecture
from benchmarks.support.architectures.checkpoints import clear_unset, fill_weights
from benchmarks.support.prompts import NAMESPACE, PREFIX, ChunkPrompt
from kintsugi.core.errors import KintsugiError
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.engine.local import Generation, LocalEngine, Prompt

ANSWER_TOKENS = 32
MAX_MODEL_LEN = 2048
KV_CACHE_BYTES = 256 << 20


class NotBlended(Exception):
    """A request was not blended, or a chunk not saved; the message is the response's reason."""


@contextmanager
def running(
    architecture: Architecture, folder: Path, dtype: str, store: str | None = None, **changes: Any
) -> Iterator[LocalEngine]:
    """An engine of the checkpoint in ``folder``; without a ``store``, vLLM alone.

    Raises what `LocalEngine.start` raises.
    """
    text_only = {"language_model_only": True} if "vision" in architecture.shows else {}
    # With AMX, vLLM takes a backend for latents that knows bfloat16 alone.
    is_latent = "mla" in architecture.shows and dtype == "float32"
    if architecture.stand_in:
        fill_dummy_models()
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        **({"load_format": "dummy"} if architecture.stand_in else {}),
        **text_only,
        **({"attention_config": {"backend": "CPU_MLA"}} if is_latent else {}),
        **architecture.arguments,
        **changes,
    }
    engine = LocalEngine.start(
        folder, extra_config=None if store is None else _connector_config(store), **arguments
    )
    try:
        yield engine
    finally:
        engine.close()


def fill_dummy_models() -> None:
    """Make vLLM's dummy loader write weights with which a model's answers depend on its prompt.

    Changes vLLM in this process, which is one row's.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(_self: object, model: Any, model_config: Any) -> None:
        clear_unset(model)
        fill_weights(model, model_config.hf_config)

    DummyModelLoader.load_weights = load_weights


def _connector_config(store: str) -> dict[str, object]:
    """Random weights have no quality to calibrate, and a busy machine is no reason to decline."""
    return {
        "store": store,
        "prefix_token_ids": list(PREFIX),
        "quality": "off",
        "loading_controller": False,
        "lookup_deadline_ms": 60_000,
        "layer_deadline_ms": 60_000,
    }


def greedy(
    token_ids: Sequence[int], params: KintsugiParams | None = None, max_tokens: int = ANSWER_TOKENS
) -> Prompt:
    return Prompt(token_ids, params, max_tokens, top_logprobs=5, ignore_eos=True)


def ask_cold(
    engine: LocalEngine, token_ids: Sequence[int], params: KintsugiParams | None = None
) -> Generation:
    """Answer with nothing in the prefix cache."""
    engine.reset_prefix_cache()
    return engine.generate([greedy(token_ids, params)])[0]


def save(engine: LocalEngine, prompt: ChunkPrompt) -> None:
    """Store the prompt's chunks. Raises `NotBlended` with the reason if one is not stored."""
    try:
        saves = engine.save(PREFIX, prompt.chunks, NAMESPACE)
    except KintsugiError as error:
        raise NotBlended(str(error)) from error
    for one in saves:
        if not one.is_saved:
            raise NotBlended(str((one.accounting or {}).get("reason")))


def blend_cold(
    engine: LocalEngine, prompt: ChunkPrompt, ratio: float, selector: SelectorName | None = None
) -> Generation:
    """Blend with nothing in the prefix cache. Raises `NotBlended` if it was not."""
    params = KintsugiParams(
        NAMESPACE, spans=prompt.spans, ratio=ratio, selector=selector, explain=selector is not None
    )
    return require_blended(ask_cold(engine, prompt.token_ids, params))


def require_blended(generation: Generation) -> Generation:
    """The same generation. Raises `NotBlended` unless stored bytes were loaded for it."""
    accounting = generation.accounting or {}
    if accounting.get("outcome") != "blended" or not accounting.get("bytes_loaded"):
        raise NotBlended(str(accounting.get("reason") or f"not blended: {accounting}"))
    return generation

"""Starts an engine for measurements."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.core.layout import codec_named
from kintsugi.core.prompt import FormName
from kintsugi.engine.local import FORCING, LocalEngine
from kintsugi.models.prompt_form import NO_ARGS, PromptForm, load_form
from kintsugi.models.reference import resolve_model
from kintsugi.models.texts import read_user_text

PATIENCE_MS = 120_000
"""Deadline for lookups and layers: long, so that a busy machine does not cause declined blends."""


@dataclass(frozen=True)
class MeasuringEngineSpec:
    """The engine to measure. Start it as it will serve: a report is bound to dtype, KV dtype and prefix."""

    model: str
    codec: str = "raw"
    store: str | None = None
    """URL of the chunk store. None: in this process's memory, for the lifetime of the engine."""
    form: PromptForm | None = None
    """How prompts are written; its head is what chunks are prefilled behind. None: the model's own."""
    context_token_ids: tuple[int, ...] = ()
    extra_config: Mapping[str, object] = field(default_factory=dict)
    vllm_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        codec_named(self.codec)
        if self.extra_config.get("plain_copies") is False:
            raise InvalidField(
                "connector.plain_copies",
                "must stay on while a model is measured: without plain copies every prompt's first chunk is "
                "a miss. Blends are equally good without them, and cost that chunk more",
            )


def read_context_length(model: str) -> int:
    """The model's context length in tokens. Raises `NotFound`, and as `reference.fetch_model` does."""
    from transformers import AutoConfig

    path = resolve_model(model)
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise NotFound(
            f"{model} is neither a checkpoint folder nor a model that can be downloaded "
            f"({type(error).__name__}); check the name"
        ) from None
    return int(getattr(config, "max_position_embeddings", 0) or 1 << 30)


def load_form_behind(
    model: str, name: FormName, system: Path | None, vllm_args: Mapping[str, Any] = NO_ARGS
) -> PromptForm:
    """The model's form with the system prompt in a file; None: the template's own, if it has one.

    Raises `NotFound` for a missing model, and as `read_user_text` and `PromptForm.of` do.
    """
    text = None
    if system is not None:
        text = read_user_text(system, "system", "a text file with the system prompt")
    return load_form(model, name, text, vllm_args)


@contextmanager
def start_measuring_engine(spec: MeasuringEngineSpec) -> Iterator[LocalEngine]:
    """Run an engine within the context. No gate and no loading controller refuse a blend, and prefix caching
    is off, so every method starts from the first token."""
    extra: dict[str, object] = {
        "store": spec.store or f"ram://quality-{uuid.uuid4().hex[:8]}",
        "allow_uncalibrated": True,
        "loading_controller": False,
        "codec": spec.codec,
        "lookup_deadline_ms": PATIENCE_MS,
        "layer_deadline_ms": PATIENCE_MS,
        **spec.extra_config,
    }
    if spec.form is not None:
        extra["prefix_token_ids"] = list(spec.form.head)
    if spec.context_token_ids:
        extra["context_token_ids"] = list(spec.context_token_ids)
    arguments: dict[str, Any] = {
        "disable_log_stats": True,
        **spec.vllm_args,
        "enable_prefix_caching": False,
        "logits_processors": [FORCING],
    }
    with LocalEngine.start(spec.model, extra_config=extra, **arguments) as engine:
        yield engine

"""Starts an engine for measurements."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import codec_named
from kintsugi.engine.local import LocalEngine
from kintsugi.models.prompt_form import PromptForm

PATIENCE_MS = 120_000
"""Deadline for lookups and layers. It is long, so that blends are not declined on a busy machine."""


@dataclass(frozen=True)
class MeasuringEngineSpec:
    """Configuration of the engine to measure. It must match the serving engines: a report is bound to dtype,
    KV dtype and prefix."""

    model: str
    codec: str = "raw"
    store: str | None = None
    """URL of the chunk store. None: in this process's memory, for the lifetime of the engine."""
    form: PromptForm | None = None
    """Form of the prompts; its head is the prefix of the chunks. None: the model's own form."""
    context_token_ids: tuple[int, ...] = ()
    extra_config: Mapping[str, object] = field(default_factory=dict)
    vllm_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        codec_named(self.codec)
        if self.extra_config.get("plain_copies") is False:
            raise InvalidField(
                "connector.plain_copies",
                "must stay on while a model is measured: without plain copies every prompt's first chunk is "
                "a miss. Serving without them has the same quality, but computes that chunk too",
            )


@contextmanager
def start_measuring_engine(spec: MeasuringEngineSpec) -> Iterator[LocalEngine]:
    """Run an engine within the context. The gate and the loading controller are off, so every prompt is
    blended; prefix caching is off, so every method starts from the first token."""
    extra: dict[str, object] = {
        "store": spec.store or f"ram://quality-{uuid.uuid4().hex[:8]}",
        "quality": "off",
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
    }
    with LocalEngine.start(spec.model, extra_config=extra, **arguments) as engine:
        yield engine

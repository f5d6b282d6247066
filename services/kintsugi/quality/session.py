"""From a model to a running engine that is measured."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.core.layout import codec_named
from kintsugi.engine.local import FORCING, LocalEngine

PATIENCE_MS = 120_000
"""A busy machine must not turn into declined blends."""


@dataclass(frozen=True)
class MeasuringEngineSpec:
    """What to measure. It has to be started as it will serve: dtype, KV dtype and prefix are bound."""

    model: str
    codec: str = "raw"
    store: str | None = None
    """URL of the chunk store. None: memory of this process, gone with the engine."""
    prefix_token_ids: tuple[int, ...] | None = None
    extra_config: Mapping[str, object] = field(default_factory=dict)
    vllm_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        codec_named(self.codec)


def tokenizer_of(model: str) -> tuple[Any, int]:
    """The tokenizer, and how many tokens the model reads. Raises `NotFound`."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(model).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise NotFound(
            f"{model} is neither a checkpoint folder nor a model that can be downloaded "
            f"({type(error).__name__}); check the name"
        ) from None
    return tokenizer, int(getattr(config, "max_position_embeddings", 0) or 1 << 30)


def prefix_of_file(model: str, path: Path) -> tuple[int, ...]:
    """Token ids of a system prompt in a file, as they begin a real prompt.

    Raises `NotFound` for a file or model that is not there, `InvalidField` for what is no text.
    """
    if not path.is_file():
        raise NotFound(f"{path} is not a file; name a text file with the system prompt")
    try:
        text = path.read_bytes().decode()  # reading as text would change the ends of lines
    except UnicodeDecodeError:
        raise InvalidField("system", f"{path} is not UTF-8 text; convert it first") from None
    tokenizer, _ = tokenizer_of(model)
    return tuple(tokenizer(text).input_ids)


@contextmanager
def start_measuring_engine(spec: MeasuringEngineSpec) -> Iterator[LocalEngine]:
    """Start and close. Nothing is gated or refused for its speed here, and no prefix is cached: a method
    answers from the start."""
    extra: dict[str, object] = {
        "store": spec.store or f"ram://quality-{uuid.uuid4().hex[:8]}",
        "allow_uncalibrated": True,
        "loading_controller": False,
        "codec": spec.codec,
        "lookup_deadline_ms": PATIENCE_MS,
        "layer_deadline_ms": PATIENCE_MS,
        **spec.extra_config,
    }
    if spec.prefix_token_ids is not None:
        extra["prefix_token_ids"] = list(spec.prefix_token_ids)
    arguments: dict[str, Any] = {
        "disable_log_stats": True,
        **spec.vllm_args,
        "enable_prefix_caching": False,
        "logits_processors": [FORCING],
    }
    with LocalEngine.start(spec.model, extra_config=extra, **arguments) as engine:
        yield engine

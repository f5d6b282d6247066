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
from kintsugi.engine.local import FORCING, LocalEngine

PATIENCE_MS = 120_000
"""Deadline for lookups and layers: long, so that a busy machine does not cause declined blends."""


@dataclass(frozen=True)
class MeasuringEngineSpec:
    """The engine to measure. Start it as it will serve: a report is bound to dtype, KV dtype and prefix."""

    model: str
    codec: str = "raw"
    store: str | None = None
    """URL of the chunk store. None: in this process's memory, for the lifetime of the engine."""
    prefix_token_ids: tuple[int, ...] | None = None
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


def load_tokenizer(model: str) -> tuple[Any, int]:
    """Load the tokenizer. Returns it and the model's context length in tokens. Raises `NotFound`."""
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


def tokenize_prefix(model: str, path: Path) -> tuple[int, ...]:
    """Tokenise the system prompt in a file as it begins a real prompt, special tokens included.

    Raises `NotFound` for a missing file or model, `InvalidField` for a file that is not text.
    """
    if not path.is_file():
        raise NotFound(f"{path} is not a file; name a text file with the system prompt")
    try:
        text = path.read_bytes().decode()  # reading as text would translate line endings
    except UnicodeDecodeError:
        raise InvalidField("system", f"{path} is not UTF-8 text; convert it first") from None
    tokenizer, _ = load_tokenizer(model)
    return tuple(tokenizer(text).input_ids)


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
    if spec.prefix_token_ids is not None:
        extra["prefix_token_ids"] = list(spec.prefix_token_ids)
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

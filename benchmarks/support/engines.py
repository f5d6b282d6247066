"""Engines in this process, one at a time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.support.prompts import NAMESPACE, PREFIX, ChunkPrompt
from kintsugi.core.plan import Selection
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from tests.fakes.random_models.factory import make_checkpoint_once


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def engine(
    shape: str | Path,
    plugin: bool = True,
    layers: int | None = None,
    extra: Mapping[str, object] | None = None,
    **vllm_args: Any,
) -> Iterator[LocalEngine]:
    """``shape``: of a model with random weights, or a checkpoint folder."""
    say(f"starting {shape}{'' if plugin else ' without the plugin'}")
    # Long deadlines, so that a busy machine does not cause declined blends.
    patience = {"lookup_deadline_ms": 30_000, "layer_deadline_ms": 30_000}
    config = {
        "store": f"ram://bench-{Path(shape).name}",
        "quality": "off",
        "loading_controller": False,
        **patience,
        **(extra or {}),
    }
    if plugin:
        say("random weights: blending without evidence (quality: off)")
    arguments = {"dtype": "bfloat16", "max_model_len": 8192, **vllm_args}
    folder = shape if isinstance(shape, Path) else make_checkpoint_once(shape, layers=layers)
    running = LocalEngine.start(folder, extra_config=config if plugin else None, **arguments)
    try:
        yield running
    finally:
        running.close()


def store_chunks(running: LocalEngine, prompt: ChunkPrompt) -> None:
    for generation in running.save(PREFIX, prompt.chunks, NAMESPACE):
        accounting = generation.accounting or {}
        assert accounting.get("outcome") == "saved", accounting


def cold(running: LocalEngine, prompt: Prompt) -> Generation:
    """Answer with nothing in the prefix cache."""
    running.reset_prefix_cache()
    return running.generate([prompt])[0]


def use_check_layer(running: LocalEngine, check_layer: int) -> None:
    """Change the engine's check layer between requests, so that configurations can be interleaved."""
    running.plan_with(Selection(0.15, check_layer=check_layer))

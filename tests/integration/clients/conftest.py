"""`kintsugi serve`, as its users start it, for clients that nobody here wrote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="install the extra `serving`")

from kintsugi.core.errors import Unavailable
from kintsugi.models.reference import REFERENCE, fetch_model
from tests.integration.engine.conftest import EngineSlot
from tests.integration.serving.test_serve_command import START_S, serving

CLIENTS_PYTHON = "KINTSUGI_TEST_CLIENTS_PYTHON"
"""The interpreter that has the clients of locks/clients.in (`make clients` sets it)."""
CLIENT_S = 240.0
LAYERS, HEADS, WIDTH = 2, 4, 128


@dataclass(frozen=True)
class ServiceUnderTest:
    """What a client is told."""

    http: str
    grpc: str
    model: str
    """Name of the model, which is the folder that clients read the tokenizer from."""
    no_blanks: dict[str, int]
    """`logit_bias` for tool calls: JSON allows blanks without end, and random weights would write them."""

    @property
    def url(self) -> str:
        """As OpenAI's clients want it."""
        return f"{self.http}/v1"


def make_small_model(folder: Path) -> Path:
    """The reference model's tokenizer and template over a few random weights: clients count tokens and write
    tool calls as with a real model, and an answer takes milliseconds. Skips without the reference model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    try:
        reference = fetch_model(REFERENCE)
    except Unavailable as error:
        pytest.skip(str(error))
    shutil.copytree(reference, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    config = LlamaConfig.from_pretrained(
        reference,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=WIDTH // HEADS,
        initializer_range=0.2,
        dtype="float32",  # greedy answers repeat exactly
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def ban_blanks(model: str) -> dict[str, int]:
    """A bias against every token of blanks alone."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    return {str(token): -100 for token, text in texts.items() if text and not text.strip()}


@pytest.fixture(scope="package")
def service(engine_slot: EngineSlot, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceUnderTest]:
    engine_slot.close()
    folder = tmp_path_factory.mktemp("clients")
    model = str(make_small_model(folder / "model"))
    config = folder / "service.yaml"
    config.write_text(
        json.dumps(
            {
                "model": {"path": model, "name": model},
                # The namespace of clients that name none.
                "privacy": {"default": {"discover": True}},
                "engines": {
                    "quality": "off",
                    # A model this small is prefilled faster than anything is loaded: blend it all the same.
                    "expert": {"loading_controller": False, "load_deadline_ms": 60_000},
                    # As `no_blanks`, for answers that are JSON but no tool calls.
                    "vllm": {
                        "max_model_len": 2048,
                        "kv_cache_memory_bytes": 1 << 28,
                        "tool_call_parser": "hermes",
                        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
                    },
                },
            }
        )
    )
    with serving(folder, "--config", str(config)) as command:
        ready = command.event("ready", START_S)
        yield ServiceUnderTest(ready["http"], ready["grpc"], model, ban_blanks(model))
        command.stop(signal.SIGTERM)


@pytest.fixture(scope="session")
def clients_python() -> str:
    """The interpreter that has clients which are not among our own requirements."""
    return os.environ.get(CLIENTS_PYTHON, sys.executable)


def require(python: str, package: str) -> None:
    """Skip where the interpreter lacks a client's package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([python, "-c", code], check=False).returncode:
        pytest.skip(f"{package} is not installed for {python}; make clients installs it")


def run_client(arguments: Sequence[str], folder: Path) -> str:
    """What a client that succeeds prints."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")
    }
    environment |= {"HF_HUB_OFFLINE": "1", "LMCACHE_DISABLE_BANNER": "1"}
    finished = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=CLIENT_S, check=False
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, f"{' '.join(arguments)}\n{output[-3000:]}"
    return output

"""A model by its hub name: the engine downloads it, and chunks are called as by those who only read of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.engine.local import LocalEngine
from kintsugi.models.checkpoint import checkpoint_folder, model_fingerprint
from tests.fakes.hub import COMMIT, FakeHub, point_library, serving
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.integration.engine.conftest import PATIENT, UNCALIBRATED, EngineSlot

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_an_engine_and_a_reader_agree_on_the_fingerprint(
    engine_slot: EngineSlot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_slot.close()
    folder = make_checkpoint_once("tiny-llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    # A file of the tokenizer that its class does not read.
    files["vocab.txt"] = b"tea\n"
    with serving(FakeHub({"org/tiny": files})) as hub:
        point_library(monkeypatch, hub.url, tmp_path / "reader")
        expected = model_fingerprint(checkpoint_folder("org/tiny"), "torch.bfloat16/auto/None")
        point_library(monkeypatch, hub.url, tmp_path / "engine")
        config = {"store": "ram://hub-name", **PATIENT, **UNCALIBRATED}
        arguments = {"dtype": "bfloat16", "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
        with LocalEngine.start("org/tiny", extra_config=config, **arguments) as engine:
            assert engine.binding.model == expected
    weights = [path.name for path in (tmp_path / "engine").rglob("*.safetensors")]
    assert weights == ["model.safetensors"]
    assert COMMIT in {path.name for path in (tmp_path / "engine").rglob("snapshots/*")}

"""Models by a hub's name: what is downloaded, and what is said where that cannot be."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="install the extra `chunking`")

from kintsugi.core.errors import NotFound, PermissionDenied, Unavailable
from kintsugi.models import hub
from kintsugi.models.checkpoint import checkpoint_folder, complete, model_fingerprint, read_config
from tests.fakes.hub import COMMIT, FakeHub, point_library, serving


def weights(*names: str) -> bytes:
    entries = {name: {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]} for name in names}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


CONFIG = {
    "config.json": b'{"hidden_size": 8}',
    "tokenizer.json": b"{}",
    "vocab.json": b"[]",
    "README.md": b"words",
}
MODELS = {
    "org/small": {**CONFIG, "model.safetensors": weights("a"), "original/other.safetensors": weights("z")},
    "org/large": {
        **CONFIG,
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        ).encode(),
        "model-1.safetensors": weights("a"),
        "model-2.safetensors": weights("b"),
        "consolidated.safetensors": weights("a", "b"),
    },
    "org/none": CONFIG,
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(FakeHub({**MODELS}, gated=frozenset({"org/gated"}))) as one:
        point_library(monkeypatch, one.url, tmp_path / "hub")
        yield one


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return folder


def test_a_folder_is_left_alone(tmp_path: Path) -> None:
    assert checkpoint_folder(tmp_path) == tmp_path
    assert checkpoint_folder(tmp_path / "absent") == tmp_path / "absent"


def test_of_a_name_the_small_files_are_downloaded_and_no_weights(fake: FakeHub) -> None:
    folder = checkpoint_folder("org/large")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "vocab.json",
    ]
    assert folder == hub.snapshot("org/large")
    assert hub.name_of(folder) == "org/large"
    assert hub.name_of(hub.snapshot("org/a--b")) == "org/a--b"
    assert read_config("org/large") == {"hidden_size": 8}
    before = list(fake.fetched)
    assert checkpoint_folder("org/large") == folder
    assert fake.fetched == before


@pytest.mark.parametrize("name", ["org/small", "org/large"])
def test_the_fingerprint_needs_no_weights_and_is_that_of_who_has_them(
    fake: FakeHub, name: str, tmp_path: Path
) -> None:
    remote = model_fingerprint(checkpoint_folder(name), "bfloat16")
    assert model_fingerprint(name, "bfloat16") == remote
    files = {path: data for path, data in MODELS[name].items() if not path.startswith("consolidated")}
    whole = put(tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT, files)
    assert model_fingerprint(whole, "bfloat16") == remote


def test_an_engine_that_has_fewer_of_the_tokenizers_files_fetches_the_rest(fake: FakeHub) -> None:
    """Which files vLLM has read must not decide what chunks are called."""
    checkpoint_folder("org/small")
    expected = model_fingerprint("org/small", "bfloat16")
    (hub.snapshot("org/small") / "vocab.json").unlink()
    assert model_fingerprint("org/small", "bfloat16") != expected
    complete("org/small")
    assert model_fingerprint("org/small", "bfloat16") == expected


def test_without_a_hub_what_is_there_has_to_do(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = checkpoint_folder("org/large")
    point_library(monkeypatch, "http://127.0.0.1:9", tmp_path / "hub")
    assert checkpoint_folder("org/large") == folder
    complete("org/small")
    with pytest.raises(Unavailable, match="org/large cannot be downloaded"):
        model_fingerprint(folder, "bfloat16")
    with pytest.raises(Unavailable, match=r"hf download org/small"):
        checkpoint_folder("org/small")


def test_what_cannot_be_downloaded_says_what_to_do(fake: FakeHub) -> None:
    with pytest.raises(NotFound, match="neither a folder nor a model of the hub"):
        checkpoint_folder("org/absent")
    with pytest.raises(PermissionDenied, match="HF_TOKEN"):
        checkpoint_folder("org/gated")
    with pytest.raises(NotFound, match=r"no \*\.safetensors"):
        model_fingerprint(checkpoint_folder("org/none"), "bfloat16")
    with pytest.raises(NotFound, match="neither"):
        checkpoint_folder("org/small", revision="absent branch")

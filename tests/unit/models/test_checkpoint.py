"""The model fingerprint changes with everything that decides KV, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import Corrupted, InvalidField, NotFound
from kintsugi.models import checkpoint
from kintsugi.models.checkpoint import digest_weights, longrope_factors, model_fingerprint, tokenizer_digest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "transformers_version": "5.0.0",
}

ENDLESS = b'{"w": {"dtype": "F32", "shape": [1e999]}}'
"""A header with an extent beyond every number."""


def write_safetensors(path: Path, name: str = "w", data: bytes = bytes(8), dtype: str = "F32") -> None:
    entry = {"dtype": dtype, "shape": [len(data) // 4], "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, name: entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    write_safetensors(path / "model.safetensors")
    return path


def change_weight_byte(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    status = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def change_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def change_tensor_name(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", name="v")


def change_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"a": 1}')


def change_rope(folder: Path) -> None:
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 10_001.0})


def change_architecture(folder: Path) -> None:
    change_config(folder, hidden_size=16)


def add_unknown_field(folder: Path) -> None:
    change_config(folder, a_field_of_the_future=1)


@pytest.mark.parametrize(
    "change",
    [
        change_weight_byte,
        change_tensor_name,
        change_tokenizer,
        change_rope,
        change_architecture,
        add_unknown_field,
    ],
)
def test_what_decides_kv_changes_it(folder: Path, change: Callable[[Path], None]) -> None:
    before = model_fingerprint(folder, "bfloat16")
    change(folder)
    assert model_fingerprint(folder, "bfloat16") != before


def test_a_tokenizer_is_told_from_another_whatever_the_weights(folder: Path) -> None:
    before = tokenizer_digest(folder)
    change_weight_byte(folder)
    assert tokenizer_digest(str(folder)) == before
    change_tokenizer(folder)
    assert tokenizer_digest(folder) not in ("", before)
    (folder / "tokenizer.json").unlink()
    assert tokenizer_digest(folder) == ""


def test_kv_dtype_and_overrides_change_it(folder: Path) -> None:
    plain = model_fingerprint(folder, "bfloat16")
    assert model_fingerprint(folder, "fp8_e4m3") != plain
    assert model_fingerprint(folder, "bfloat16", {"rope_theta": 1.0}) != plain
    assert model_fingerprint(str(folder), "bfloat16", {}) == plain


def test_the_engine_s_length_changes_it_only_where_it_chooses_longrope_s_factors(folder: Path) -> None:
    plain = model_fingerprint(folder, "bfloat16")
    assert model_fingerprint(folder, "bfloat16", max_model_len=131_072) == plain
    longrope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    change_config(folder, rope_parameters=longrope, original_max_position_embeddings=4096)
    short = model_fingerprint(folder, "bfloat16", max_model_len=4096)
    assert model_fingerprint(folder, "bfloat16") == short
    assert model_fingerprint(folder, "bfloat16", max_model_len=131_072) != short


def test_what_does_not_decide_kv_leaves_it(folder: Path, tmp_path: Path) -> None:
    before = model_fingerprint(folder, "bfloat16")
    change_config(folder, transformers_version="6.0.0")
    (folder / "README.md").write_text("a model")
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(folder, moved)
    link = tmp_path / "link"
    link.symlink_to(moved)
    for path in (folder, moved, link):
        assert model_fingerprint(path, "bfloat16") == before


def test_shards_count_by_content_and_only_those_of_the_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "a.safetensors", "a", bytes(4))
    write_safetensors(folder / "b.safetensors", "b", bytes(8))
    write_safetensors(folder / "consolidated.safetensors", "other")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    before = model_fingerprint(folder, "bfloat16")
    (folder / "a.safetensors").rename(folder / "c.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "c.safetensors", "b": "b.safetensors"}}))
    assert model_fingerprint(folder, "bfloat16") == before
    (folder / "c.safetensors").unlink()
    with pytest.raises(NotFound, match="incomplete"):
        model_fingerprint(folder, "bfloat16")


def test_a_hub_snapshot_counts_by_revision(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = tmp_path / "models--org--name" / "snapshots"
    first, second = (snapshots / (digit * 40) for digit in "ab")
    for snapshot in (first, second):
        shutil.copytree(folder, snapshot)
    shutil.copytree(folder, snapshots / "main")
    read: list[str] = []
    real = checkpoint._content_digest

    def recorded(file: Path, size: int, mtime_ns: int) -> str:
        read.append(file.name)
        return real(file, size, mtime_ns)

    monkeypatch.setattr(checkpoint, "_content_digest", recorded)
    assert model_fingerprint(first, "bfloat16") != model_fingerprint(second, "bfloat16")
    assert "model.safetensors" not in read, "a revision spares reading the weights"
    assert model_fingerprint(snapshots / "main", "bfloat16") == model_fingerprint(folder, "bfloat16")


def test_a_hub_name_means_its_snapshot(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--name"
    commit = "c" * 40
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    by_folder = model_fingerprint(repository / "snapshots" / commit, "bfloat16")
    assert model_fingerprint("org/name", "bfloat16") == by_folder
    assert model_fingerprint("org/name", "bfloat16", revision=commit) == by_folder
    with pytest.raises(NotFound, match="hf download"):
        model_fingerprint("org/name", "bfloat16", revision="other")


def test_unchanged_files_are_read_once(folder: Path) -> None:
    model_fingerprint(folder, "bfloat16")
    misses = checkpoint._content_digest.cache_info().misses
    model_fingerprint(folder, "float16")
    assert checkpoint._content_digest.cache_info().misses == misses


def test_what_is_missing_says_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(NotFound, match="hf download org/name"):
        model_fingerprint("org/name", "bfloat16")
    with pytest.raises(NotFound, match="check the path"):
        model_fingerprint(tmp_path / "absent", "bfloat16")
    with pytest.raises(InvalidField, match="kv_dtype"):
        model_fingerprint(folder, "")
    (folder / "model.safetensors").unlink()
    with pytest.raises(NotFound, match="safetensors"):
        model_fingerprint(folder, "bfloat16")
    (folder / "config.json").unlink()
    with pytest.raises(NotFound, match=r"config\.json"):
        model_fingerprint(folder, "bfloat16")


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"short", b"\xff" * 64, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 4) + b"{no}"),
        struct.pack("<Q", 40_000) + b"[" * 40_000,
        struct.pack("<Q", len(ENDLESS)) + ENDLESS,
    ],
)
def test_broken_weights_are_corrupted(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(Corrupted, match="download it again"):
        model_fingerprint(folder, "bfloat16")


def test_weights_that_are_no_file_are_corrupted(folder: Path) -> None:
    """Reading a device or a pipe would not end."""
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.symlink_to("/dev/zero")
    with pytest.raises(Corrupted, match="not a file"):
        model_fingerprint(folder, "bfloat16")
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(Corrupted, match="not a file"):
        model_fingerprint(folder, "bfloat16")


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 40_000])
def test_a_broken_config_is_corrupted(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(Corrupted, match=r"config\.json"):
        model_fingerprint(folder, "bfloat16")


@pytest.mark.parametrize("weight_map", [None, {"a": 1}])
def test_a_broken_index_is_corrupted(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(Corrupted, match="weight_map"):
        model_fingerprint(folder, "bfloat16")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/dev/zero", "..", "", "a\0b"])
def test_an_index_names_files_of_its_folder_alone(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(Corrupted, match="which is not in the folder"):
        model_fingerprint(folder, "bfloat16")


def test_weights_that_were_read_ahead_are_not_read_again(folder: Path) -> None:
    digest_weights(folder)
    read = checkpoint._content_digest.cache_info().misses
    (folder / "tokenizer.json").unlink()
    model_fingerprint(folder, "bfloat16")
    assert checkpoint._content_digest.cache_info().misses == read


@pytest.mark.parametrize("name", ["nobody/nothing", "/nowhere", "", "."])
def test_what_cannot_be_read_ahead_is_left_to_who_needs_it(name: str) -> None:
    digest_weights(name)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
TRAINED = {"original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "max_model_len", "factors"),
    [
        ({"rope_parameters": LONGROPE, **TRAINED}, 4096, "short"),
        ({"rope_parameters": LONGROPE, **TRAINED}, 4097, "long"),
        ({"rope_parameters": LONGROPE, **TRAINED}, None, "short"),
        ({"rope_parameters": LONGROPE, **TRAINED}, -1, "short"),
        ({"rope_parameters": {**LONGROPE, **TRAINED}, "max_position_embeddings": 8192}, None, "long"),
        ({"rope_parameters": LONGROPE}, 10, "long"),
        ({"rope_scaling": {"type": "su", **TRAINED}}, 8192, "long"),
        ({"rope_parameters": {"full_attention": {**LONGROPE, **TRAINED}}}, 8192, "long"),
        ({"text_config": {"rope_parameters": LONGROPE, **TRAINED}}, 100, "short"),
        ({"rope_parameters": {"rope_type": "yarn", **TRAINED}}, 8192, None),
        ({}, 8192, None),
    ],
)
def test_longrope_rotates_by_factors_that_the_engine_s_length_chooses(
    config: dict[str, Any], max_model_len: int | None, factors: str | None
) -> None:
    assert longrope_factors(config, max_model_len) == factors

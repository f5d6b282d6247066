"""vLLM's archive for a bare GPU machine: what of an object and of a wheel travels, and how it arrives."""

from __future__ import annotations

import re
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import bare, device, pack
from benchmarks.gpu.fatbin import MACHINE_CODE, MAGIC, Container, find_containers, slice_object

PTX, HEADER, ENTRY = 1, 16, 32
REPOSITORY = Path(__file__).parents[2]


def entry(arch: int, code: bytes, kind: int = MACHINE_CODE) -> bytes:
    head = struct.pack("<HHIQ", kind, 0, ENTRY, len(code)).ljust(28, b"\0") + struct.pack("<I", arch)
    return head + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", MAGIC, 1, HEADER, len(body)) + body


def shared_object(*containers: bytes) -> bytes:
    """An ELF object with `.nv_fatbin`, whose containers have padding between them, and code before it."""
    names, start = b"\0.nv_fatbin\0.shstrtab\0", 64
    fatbin = b"".join(one.ljust(-(-len(one) // 8) * 8 + 8, b"\0") for one in containers) + bytes(16)
    table = start + len(fatbin) + len(names)
    headers = [
        (0,) * 10,
        (1, 1, 0, 0, start, len(fatbin), 0, 0, 8, 0),
        (12, 3, 0, 0, start + len(fatbin), len(names), 0, 0, 1, 0),
    ]
    head = bytearray(b"\x7fELF".ljust(64, b"h"))
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, len(headers), 2)
    return bytes(head) + fatbin + names + b"".join(struct.pack("<IIQQQQIIQQ", *one) for one in headers)


def codes(data: bytes, one: Container) -> list[bytes]:
    return [data[found.code : found.end] for found in one.entries]


def test_only_the_architectures_machine_code_stays() -> None:
    data = shared_object(
        container(entry(80, b"eighty.."), entry(90, b"ninety.."), entry(90, b"virtual.", PTX)),
        container(entry(80, b"eighty and more"), entry(75, b"old")),
        container(entry(90, b"a longer code of sm_90")),
    )
    sliced = slice_object(data, 90)
    assert len(sliced) == len(data)
    assert b"eighty" not in sliced
    assert b"virtual" not in sliced
    first, emptied, last = find_containers(sliced)
    assert codes(sliced, first) == [b"ninety.."]
    assert codes(sliced, emptied) == [b"ninety.."], "CUDA refuses an empty container"
    assert codes(sliced, last) == [b"a longer code of sm_90"]
    assert sliced[:64] == data[:64]


def test_of_the_forward_kernels_the_wanted_ones_stay() -> None:
    one, other, helper = b".text.FlashAttnFwd_bf16", b".text.FlashAttnFwd_fp8", b".text.combine"
    data = shared_object(container(*(entry(90, name.ljust(32, b"\0")) for name in (one, other, helper))))
    sliced = slice_object(data, 90, "bf16")
    (found,) = find_containers(sliced)
    assert [code.rstrip(b"\0") for code in codes(sliced, found)] == [one, helper]


def test_an_object_without_the_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="no machine code for sm_90"):
        slice_object(shared_object(container(entry(80, b"eighty"))), 90)


def test_the_archive_holds_what_is_wanted_and_arrives_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "vllm-0-py3-none-any.whl"
    extension = shared_object(container(entry(90, b"ninety"), entry(80, b"eighty")))
    with zipfile.ZipFile(wheel, "w") as made:
        for name in pack.SLICED:
            made.writestr(name, extension)
        made.writestr("vllm/__init__.py", "version = 1\n")
        made.writestr("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", extension)
        made.writestr("vllm/model_executor/layers/fused_moe/configs/E=8.json", "{}")
        made.writestr("vllm-0.data/purelib/vllm_beside.py", "")
        made.writestr("vllm-0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    pack.unpack([wheel], tmp_path / "site")
    archives = [tmp_path / name / "site.tar.xz" for name in ("one", "two")]
    for archive in archives:
        pack.pack(tmp_path / "site", archive)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as packed:
        others = ["vllm/__init__.py", "vllm_beside.py", "vllm-0.dist-info/METADATA"]
        assert sorted(packed.getnames()) == sorted([*others, *pack.SLICED])
    monkeypatch.setattr(bare, "ARCHIVE", archives[0])
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    site = bare.unpack_site()
    assert site is not None
    assert b"eighty" not in (site / next(iter(pack.SLICED))).read_bytes()
    (site / "vllm" / "__init__.py").write_text("kept = 1\n")
    assert bare.unpack_site() == site
    assert (site / "vllm" / "__init__.py").read_text() == "kept = 1\n", "unpacked once"
    assert device.find_vllm() == "0.32.0"


def test_without_an_archive_nothing_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "ARCHIVE", tmp_path / "absent")
    assert bare.unpack_site() is None


def test_what_is_too_large_is_named() -> None:
    assert pack.find_excess(39.9, 20.0) == []
    assert pack.find_excess(41.0, 19.5) == ["gpu_pack_mib: 60.5 MiB, more than 60"]
    assert pack.find_excess(30.0, 20.5) == ["the tracked files: 20.5 MiB, more than 20"]


def test_the_tracked_files_leave_room_for_the_archive() -> None:
    assert pack.tree_bytes() / 2**20 <= pack.TREE_MIB_MAX


def test_it_packs_the_versions_that_the_gpus_lock_names() -> None:
    """What is measured is what is installed."""
    pins = [
        dict(re.findall(r"^([\w-]+)==(\S+)", (REPOSITORY / "locks" / name).read_text(), re.MULTILINE))
        for name in ("gpu-pack.txt", "gpu.txt")
    ]
    assert pins[0]["vllm"]
    assert {name: pins[1][name] for name in pins[0]} == pins[0]

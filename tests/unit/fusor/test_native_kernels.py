"""The CPU kernels for rotation and for the question's attention against torch, and builds that fail."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kintsugi.core.errors import Unavailable
from kintsugi.fusor.kernels import native
from kintsugi.fusor.kernels.native import Instructions, MassKernel, RotationKernel
from kintsugi.fusor.question import attention_mass
from kintsugi.fusor.rope import Rotary
from kintsugi.fusor.stack import AttentionRule

REPOSITORY = Path(__file__).parents[3]
ROWS = 500


@pytest.fixture(scope="module", params=list(Instructions))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    instructions: Instructions = request.param
    if instructions not in native.find_instructions() or native.find_compiler() is None:
        pytest.skip(f"the CPU kernels: no {instructions} or no C++ compiler here")
    folder = tmp_path_factory.mktemp("native")
    native.build(folder, instructions)
    return native.load(folder)


@pytest.mark.skipif(
    native.find_compiler() is None or platform.machine() != "x86_64", reason="no C++ compiler for x86-64 here"
)
@pytest.mark.parametrize("instructions", Instructions)
def test_every_library_builds_where_it_cannot_run(instructions: Instructions, tmp_path: Path) -> None:
    native.build(tmp_path, instructions)
    assert (tmp_path / native.LIBRARY).stat().st_size


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        (set(), ()),
        ({"_init_amx"}, ()),
        ({"_is_avx512_supported"}, (Instructions.AVX512,)),
        (
            {"_is_avx512_supported", "_is_avx512_bf16_supported"},
            (Instructions.AVX512_BF16, Instructions.AVX512),
        ),
        ({"_is_avx512_supported", "_is_avx512_bf16_supported", "_init_amx"}, tuple(Instructions)),
    ],
    ids=lambda value: f"{len(value)}",
)
def test_a_processor_is_served_by_its_best_instructions(
    has: set[str], expected: tuple[Instructions, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(**{name: lambda: True for name in has}))
    assert native.find_instructions.__wrapped__() == expected


def test_a_library_of_other_instructions_has_another_name() -> None:
    assert len({native.inputs(instructions) for instructions in Instructions}) == len(Instructions)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (64, 16), (80, 40), (128, 3), (6, 3)])
def test_keys_turn_as_torch_turns_them_bit_by_bit(
    library: ctypes.CDLL, neox: bool, head_dim: int, half: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    cos, sin = torch.randn(2, ROWS, half, generator=generator)
    keys = torch.randn(77, 3, head_dim, generator=generator).to(torch.bfloat16)
    keys[0, 0, :4] = torch.tensor([1e-40, -0.0, 3e38, -1e-39])
    before = keys.clone()
    positions = torch.randint(0, ROWS, (77,), generator=generator)
    found = Rotary(cos, sin, neox, RotationKernel(library)).rotate(keys, positions)
    expected = Rotary(cos, sin, neox).rotate(keys, positions)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(keys, before)


def test_infinite_and_undefined_keys_stay_so(library: ctypes.CDLL) -> None:
    cos, sin = torch.ones(1, 16), torch.full((1, 16), 0.5)
    keys = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    keys[0, 0, :2] = torch.tensor([float("inf"), float("nan")])
    positions = torch.zeros(1, dtype=torch.int64)
    found = Rotary(cos, sin, True, RotationKernel(library)).rotate(keys, positions)
    torch.testing.assert_close(found, Rotary(cos, sin, True).rotate(keys, positions), equal_nan=True)


def test_no_position_is_read_outside_the_table(library: ctypes.CDLL) -> None:
    rotary = Rotary(torch.ones(5, 16), torch.ones(5, 16), True, RotationKernel(library))
    keys = torch.ones(2, 1, 32, dtype=torch.bfloat16)
    for positions in ([0, 5], [-1, 0]):
        with pytest.raises(IndexError, match="5 rows"):
            rotary.rotate(keys, torch.tensor(positions))
    assert rotary.rotate(keys[:0], torch.tensor([], dtype=torch.int64)).shape == (0, 1, 32)


def test_what_the_kernel_cannot_turn_is_left_to_torch(library: ctypes.CDLL) -> None:
    rotary = Rotary(torch.randn(9, 8), torch.randn(9, 8), True, RotationKernel(library))
    positions = torch.tensor([8, 1])
    for keys in (torch.randn(2, 2, 32), torch.randn(2, 64).to(torch.bfloat16).view(2, 2, 32)[:, :, :16]):
        expected = Rotary(rotary.cos, rotary.sin, True).rotate(keys, positions)
        assert torch.equal(rotary.rotate(keys, positions), expected)


@pytest.mark.parametrize("window", [None, 1, 60])
@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "head_dim", "context"),
    [(43, 9, 3, 64, 700), (1, 32, 8, 128, 31), (7, 8, 8, 32, 1), (70, 32, 1, 96, 33), (5, 4, 2, 256, 64)],
)
def test_attention_adds_up_as_in_torch(
    library: ctypes.CDLL,
    window: int | None,
    queries: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
) -> None:
    generator = torch.Generator().manual_seed(queries)
    query = torch.randn(queries, heads, head_dim, generator=generator).to(torch.bfloat16)
    key = torch.randn(context + queries, kv_heads, head_dim, generator=generator).to(torch.bfloat16)
    order = torch.randperm(context + queries, generator=generator)
    positions = torch.arange(context + queries)
    rule = AttentionRule(head_dim**-0.5, window)
    expected = attention_mass(query, positions[context:], key[order], positions[order], rule)
    kernel = MassKernel(library)
    found = kernel.attention_mass(
        query, positions[context:], key[order], positions[order], rule.scale, window
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    by_rule = AttentionRule(rule.scale, window, None, kernel)
    assert torch.equal(
        attention_mass(query, positions[context:], key[order], positions[order], by_rule), found
    )


MEMORY_PROBE = """
import resource, sys
from pathlib import Path
import torch
from kintsugi.fusor.kernels import native
from kintsugi.fusor.kernels.native import MassKernel

queries, keys, room = map(int, sys.argv[2:])
assert native.find_instructions()
kernel = MassKernel(native.load(Path(sys.argv[1])))
query, key = (torch.zeros(n, 1, 32, dtype=torch.bfloat16) for n in (queries, keys))
arguments = (query, torch.full((queries,), keys), key, torch.arange(keys), 1.0, None)
kernel.attention_mass(query[:1], arguments[1][:1], key[:1], torch.arange(1), 1.0, None)  # its threads run
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
try:
    total = kernel.attention_mass(*arguments)
except MemoryError as error:
    print(error)
else:
    print(round(float(total.sum())))
"""


@pytest.mark.parametrize(
    ("room_mib", "answer"), [(28, "6400"), (8, "no memory to sum the attention to 40000 keys")]
)
def test_a_sum_takes_little_memory_or_says_that_there_is_none(
    library: ctypes.CDLL, room_mib: int, answer: str
) -> None:
    """200 tiles of 40,000 keys: a sum for each tile would take 32 MB; keys, logits and 64 sums take 18 MB."""
    folder = Path(library._name).parent
    command = [sys.executable, "-c", MEMORY_PROBE, str(folder), "6400", "40000", str(room_mib << 20)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, answer), done.stderr


def test_what_the_kernel_cannot_sum_is_left_to_torch(library: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(5)
    key = torch.randn(40, 2, 32, generator=generator)
    for query, softcap in ((key[-3:], None), (key[-3:].to(torch.bfloat16), 20.0)):
        keys = key.to(query.dtype)
        arguments = (query, torch.arange(37, 40), keys, torch.arange(40))
        with_kernel = attention_mass(*arguments, AttentionRule(0.2, None, softcap, MassKernel(library)))
        assert torch.equal(with_kernel, attention_mass(*arguments, AttentionRule(0.2, None, softcap)))


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler was found; install"):
        native.build(tmp_path, Instructions.AMX)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho unknown option -mamx-tile >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(Unavailable, match="unknown option -mamx-tile"):
        native.build(tmp_path, Instructions.AMX)


def test_sources_are_shipped() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    shipped = project["tool"]["setuptools"]["package-data"]["*"]
    for source in (*native.SOURCES, *native.HEADERS):
        assert any(source.match(pattern) for pattern in shipped), source

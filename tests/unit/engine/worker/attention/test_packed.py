"""When the CPU kernel for scattered tokens stands in for vLLM's: only once it has read what vLLM wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kintsugi.engine.worker import native
from kintsugi.engine.worker.attention import packed
from kintsugi.engine.worker.attention.scattered import ScatteredRows, kernel_serves, replace_attention_impl
from kintsugi.fusor.attention import reference_attention
from kintsugi.fusor.kernels import native as kernels
from kintsugi.fusor.kernels.native import Instructions, find_compiler
from kintsugi.models.cache import CACHE_VARIABLE
from tests.fakes.packed_cache import pack

HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS = 4, 2, 32, 32, 6

BEST = native.instructions()

needs_kernels = pytest.mark.skipif(
    BEST is None or find_compiler() is None, reason="the packed kernel: no AVX-512 or no C++ compiler here"
)


@pytest.fixture(autouse=True)
def nothing_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(packed, "_reads", {})
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def pack_here(keys: Tensor, values: Tensor) -> Tensor:
    assert BEST is not None
    return pack(keys, values, BEST)


def write_packed(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    natural = torch.zeros(2, len(cache) * BLOCK, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    natural[0, slots], natural[1, slots] = key, value
    cache.copy_(pack_here(*natural.view(2, len(cache), BLOCK, KV_HEADS, HEAD_DIM)))


def write_by_token(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """As some other version of the backend might."""
    cache[slots // BLOCK, :, slots % BLOCK] = torch.cat((key, value), -1)


def attention(**changes: Any) -> Any:
    impl = SimpleNamespace(
        scale=HEAD_DIM**-0.5,
        logits_soft_cap=0,
        sinks=None,
        alibi_slopes=None,
        do_kv_cache_update=changes.pop("write", write_packed),
    )
    layer = {
        "impl": impl,
        "attn_backend": SimpleNamespace(get_name=lambda: "CPU_ATTN"),
        "isa": BEST and packed.ISA[BEST],
        "num_heads": HEADS,
        "head_size": HEAD_DIM,
        "head_size_v": HEAD_DIM,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "kv_cache": torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=torch.bfloat16),
    }
    impl_changes = {name: changes.pop(name) for name in tuple(changes) if hasattr(impl, name)}
    impl.__dict__.update(impl_changes)
    return SimpleNamespace(**{**layer, **changes})


def serves(layer: Any) -> bool:
    return kernel_serves(layer, torch.device("cpu"))


@needs_kernels
def test_it_serves_a_cache_that_it_can_read() -> None:
    assert serves(attention())


@needs_kernels
def test_it_declines_a_cache_that_is_packed_differently() -> None:
    assert not serves(attention(write=write_by_token))


@needs_kernels
@pytest.mark.parametrize(
    "change",
    [
        {"isa": "vec" if BEST is Instructions.AMX else "amx"},
        {"isa": "neon"},
        {"sliding_window": 40},
        {"logits_soft_cap": 30.0},
        {"sinks": torch.zeros(HEADS)},
        {"alibi_slopes": torch.zeros(HEADS)},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache": torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM)},
        {"num_heads": 66},
    ],
    ids=lambda change: next(iter(change)),
)
def test_it_declines_what_it_does_not_compute(change: dict[str, Any]) -> None:
    assert not serves(attention(**change))


def test_an_unknown_processor_keeps_the_backends_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_instructions", lambda: ())
    assert not serves(attention())
    assert native.library() is None


def test_without_a_compiler_the_backend_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not serves(attention())


def test_without_a_cache_folder_the_backend_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(file))
    assert not serves(attention())


@needs_kernels
def test_a_library_that_cannot_be_loaded_is_declined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho garbage > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert not serves(attention())


@needs_kernels
def test_a_second_process_finds_it_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serves(attention())
    native.library.cache_clear()
    monkeypatch.setattr(kernels, "build", lambda *_, **__: pytest.fail("built twice"))
    assert serves(attention())


@needs_kernels
def test_it_attends_in_the_place_of_the_backend() -> None:
    layer = attention()
    assert serves(layer)
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, HEAD_DIM, generator=generator).to(torch.bfloat16)
    table = torch.tensor([4, 1, 5], dtype=torch.int32)
    positions = torch.arange(0, 90, 5, dtype=torch.int32)
    query = torch.randn(len(positions), HEADS, HEAD_DIM, generator=generator).to(torch.bfloat16)
    output = torch.empty(len(positions), HEADS * HEAD_DIM, dtype=torch.bfloat16)
    with replace_attention_impl(layer, ScatteredRows(positions, table)):
        layer.impl.forward(layer, query, None, None, pack_here(keys, values), None, output)
    expected = reference_attention(query, keys, values, table, positions, scale=layer.impl.scale)
    torch.testing.assert_close(output.view(query.shape), expected, atol=0.02, rtol=0.02)


def test_an_engine_on_a_gpu_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_instructions", lambda: pytest.fail("asked for the kernels"))
    for kernel in (native.rotation_kernel, native.mass_kernel):
        assert kernel(torch.device("cuda")) is None


@needs_kernels
def test_an_engine_on_a_cpu_gets_every_kernel() -> None:
    for kernel in (native.rotation_kernel, native.mass_kernel):
        assert kernel(torch.device("cpu")) is not None

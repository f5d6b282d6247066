"""The kernel compiles to machine code for GPUs that are not here: what the interpreter cannot see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kintsugi.fusor.kernels import scattered

SHARED_MEMORY_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""What one block may use, by compute capability."""

ELEMENTS = {"bf16": (tl.bfloat16, 2), "fp16": (tl.float16, 2), "fp32": (tl.float32, 4)}


def compiled(
    capability: int, dtype: str, group: int, head_dim: int, tokens: int = 600, **features: Any
) -> Any:
    """Triton's compiled kernel for contiguous heads and aligned strides, as an engine's cache has them."""
    element, element_bytes = ELEMENTS[dtype]
    tile = scattered.Tile.choose_tile(tokens, group, head_dim * element_bytes)
    constants = {
        "WINDOW": 0,
        "HAS_SOFTCAP": False,
        "HAS_SINKS": False,
        "GROUP": group,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "DIM": triton.next_power_of_2(head_dim),
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "SPLITS": 1,
        "DOT_TYPE": element,
    }
    constants |= features
    output = dtype if constants["SPLITS"] == 1 else "fp32"  # parts are merged in fp32
    pointers = {
        "softmax": "fp32",
        "query": dtype,
        "output": output,
        "key_cache": dtype,
        "value_cache": dtype,
        "sinks": "fp32",
    }
    pointers |= {"block_table": "i32", "positions": "i32"}
    scalars = {"scale": "fp32", "softcap": "fp32"}
    signature, aligned = {}, {}
    for index, name in enumerate(_names()):
        pointer = f"*{pointers[name]}" if name in pointers else scalars.get(name, "i32")
        signature[name] = "constexpr" if name in constants else pointer
        if name in pointers or (name.endswith("_stride") and name not in constants):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(scattered._attend, signature, constants, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _names() -> list[str]:
    return [parameter.name for parameter in scattered._attend.params]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_mistral_and_llama_shapes_compile(capability: int) -> None:
    for group in (4, 8):
        kernel = compiled(capability, "bf16", group, 128)
        assert kernel.metadata.shared <= SHARED_MEMORY_BYTES[capability]


def test_on_hopper_the_products_use_its_matrix_units_and_loads_run_ahead() -> None:
    assembly = compiled(90, "bf16", 4, 128).asm["ptx"]
    assert "wgmma.mma_async" in assembly
    assert "cp.async" in assembly
    assert ".local" not in assembly, "registers spill"


@pytest.mark.parametrize(
    ("dtype", "group", "head_dim", "features"),
    [
        ("bf16", 8, 128, {"WINDOW": 4096}),
        ("bf16", 8, 128, {"SPLITS": 8, "HAS_SINKS": True}),
        ("bf16", 2, 256, {"WINDOW": 1024, "HAS_SOFTCAP": True}),
        ("bf16", 8, 64, {"WINDOW": 128, "HAS_SINKS": True}),
        ("fp16", 3, 80, {}),
        ("fp32", 1, 64, {}),
    ],
)
def test_every_feature_compiles(dtype: str, group: int, head_dim: int, features: dict[str, Any]) -> None:
    kernel = compiled(90, dtype, group, head_dim, **features)
    assert kernel.metadata.shared <= SHARED_MEMORY_BYTES[90]


@pytest.mark.parametrize("capability", [80, 90])
def test_merging_the_parts_compiles(capability: int) -> None:
    names = [parameter.name for parameter in scattered._merge.params]
    constants = {"HEAD_DIM": 80, "DIM": 128, "SPLITS": 16}
    pointers = {"parts": "*fp32", "softmax": "*fp32", "output": "*bf16"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    source = ASTSource(scattered._merge, signature, constants, {})
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]


def test_a_single_query_compiles() -> None:
    assert compiled(90, "bf16", 4, 128, tokens=1).metadata.num_warps == 4

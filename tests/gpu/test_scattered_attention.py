"""Scattered attention on a CUDA device: the shared cases, at the shapes of Mistral-7B and Llama-70B."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kintsugi.fusor.attention import attend_scattered
from tests.contracts.scattered_attention import (
    PATTERNS,
    TOLERANCE,
    Case,
    forgets_behind_the_window,
    ignores_the_future,
    matches_reference,
    never_reads_ahead,
)

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("scattered attention on a GPU: no CUDA device here", allow_module_level=True)

MISTRAL_7B = Case(kv_heads=8, group=4, head_dim=128, context=700, dtype="bfloat16")
LLAMA_70B = Case(kv_heads=8, group=8, head_dim=128, context=700, dtype="bfloat16")
SHAPES = {"mistral-7b": MISTRAL_7B, "llama-70b": LLAMA_70B}
VARIANTS: dict[str, dict[str, object]] = {
    **{pattern: {"pattern": pattern} for pattern in PATTERNS},
    **{f"{pattern}-window": {"pattern": pattern, "window": 100} for pattern in PATTERNS},
    **{layout: {"layout": layout} for layout in ("kv_first", "block_first", "hnd", "mixed")},
    "block-32": {"block_size": 32},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "everything": {"softcap": 30.0, "sinks": True, "window": 100, "layout": "hnd"},
    "fp8-e4m3": {"cache_dtype": "float8_e4m3fn"},
    "fp8-e5m2": {"cache_dtype": "float8_e5m2", "window": 100},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    **{f"head-dim-{dim}": {"head_dim": dim} for dim in (32, 64, 80, 256)},
    **{f"group-{group}": {"group": group, "kv_heads": 2} for group in (1, 3)},
    "long": {"context": 8192},
    **{f"rank-of-8-{n}": {"kv_heads": 1, "context": n} for n in (700, 8192, 32768)},
    **{f"splits-{n}": {"kv_heads": 1, "context": 2000, "sinks": True} for n in (1, 4, 16)},
}
CASES = [
    pytest.param(dataclasses.replace(shape, **variant), id=f"{name}-{kind}")  # type: ignore[arg-type]
    for name, shape in SHAPES.items()
    for kind, variant in VARIANTS.items()
]


@pytest.mark.parametrize("case", CASES)
def test_kernel_matches_reference(case: Case) -> None:
    assert matches_reference(attend_scattered, case, "cuda") <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("check", [never_reads_ahead, ignores_the_future], ids=lambda check: check.__name__)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_masks_by_position(check: object, window: int | None, shape: str) -> None:
    case = dataclasses.replace(SHAPES[shape], window=window)
    assert callable(check)
    assert check(attend_scattered, case, "cuda") == 0.0


def test_kernel_reads_no_block_behind_every_window() -> None:
    case = dataclasses.replace(MISTRAL_7B, window=9, pattern="ends")
    assert forgets_behind_the_window(attend_scattered, case, "cuda") == 0.0


def test_a_call_does_not_wait_for_the_device() -> None:
    case = MISTRAL_7B
    matches_reference(attend_scattered, case, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        _solve_once(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _solve_once(case: Case) -> None:
    query = torch.zeros(3, case.kv_heads * case.group, case.head_dim, dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros(4, 16, case.kv_heads, case.head_dim, dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(4, dtype=torch.int32, device="cuda")
    attend_scattered(query, cache, cache, ids, ids[:3], scale=1.0)

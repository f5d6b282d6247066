"""Scattered attention on a CUDA device: the shared cases, at the shapes of Mistral-7B and Llama-70B."""

from __future__ import annotations

import pytest
import torch

from kintsugi.fusor.attention import attend_scattered
from tests.contracts.scattered_attention import TOLERANCE, Case, matches_reference
from tests.contracts.scattered_on_device import (
    MASKS,
    MISTRAL_7B_CASE,
    SHAPES,
    VARIANTS,
    implementation_of,
    variant_of,
)

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("scattered attention on a GPU: no CUDA device here", allow_module_level=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_matches_reference(shape: str, variant: str) -> None:
    case = variant_of(SHAPES[shape], variant)
    error = matches_reference(implementation_of(case, "cuda"), case, "cuda")
    assert error <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", MASKS)
def test_kernel_masks_by_position(name: str) -> None:
    check, case = MASKS[name]
    assert check(attend_scattered, case, "cuda") == 0.0


def test_a_call_does_not_wait_for_the_device() -> None:
    case = MISTRAL_7B_CASE
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

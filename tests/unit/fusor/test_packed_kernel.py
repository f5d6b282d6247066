"""The CPU kernel over vLLM's cache: the contract of scattered attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kintsugi.fusor.kernels import native
from kintsugi.fusor.kernels.native import Instructions, PackedKernel
from tests.contracts.scattered_attention import (
    PATTERNS,
    TOLERANCE,
    Case,
    ignores_the_future,
    matches_reference,
    never_reads_ahead,
)
from tests.fakes.packed_cache import pack


class Attention:
    """The kernel behind the contract's interface."""

    def __init__(self, kernel: PackedKernel, instructions: Instructions) -> None:
        self._kernel = kernel
        self._instructions = instructions

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        positions: Tensor,
        *,
        scale: float,
        **features: Any,
    ) -> Tensor:
        assert all(feature in (None, 1.0) for feature in features.values())
        output = torch.full_like(query, float("nan"))
        cache = pack(key_cache, value_cache, self._instructions)
        self._kernel.attend(query, cache, block_table, positions, output, scale)
        return output


@pytest.fixture(scope="module", params=list(Instructions))
def attention(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Attention:
    instructions: Instructions = request.param
    if instructions not in native.find_instructions() or native.find_compiler() is None:
        pytest.skip(f"the packed kernel: no {instructions} or no C++ compiler here")
    folder = tmp_path_factory.mktemp("packed")
    native.build(folder, instructions)
    return Attention(PackedKernel(native.load(folder)), instructions)


def case(**fields: Any) -> Case:
    return Case(**{"dtype": "bfloat16", "block_size": 32, **fields})


MATRIX = [
    *(case(group=group, head_dim=dim) for group in (1, 2, 3, 8, 32) for dim in (32, 64, 96, 256)),
    *(
        case(pattern=pattern, block_size=size, context=context)
        for pattern, size, context in itertools.product(PATTERNS, (32, 128), (31, 150, 600))
    ),
]


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_kernel_matches_reference(attention: Attention, case: Case) -> None:
    assert matches_reference(attention, case, "cpu") <= TOLERANCE["bfloat16"]


@pytest.mark.parametrize("check", [never_reads_ahead, ignores_the_future])
@pytest.mark.parametrize("context", [31, 600])
def test_kernel_masks_by_position(attention: Attention, check: Any, context: int) -> None:
    assert check(attention, case(context=context), "cpu") == 0.0


def test_large_logits_do_not_overflow(attention: Attention) -> None:
    size, heads, dim = 32, 1, 32
    cache = torch.zeros(1, size, heads, dim, dtype=torch.bfloat16)
    cache[0, 3] = 100.0
    query = torch.full((1, 1, dim), 100.0, dtype=torch.bfloat16)
    ids = torch.tensor([0], dtype=torch.int32)
    found = attention(query, cache, cache, ids, torch.tensor([20], dtype=torch.int32), scale=1.0)
    assert torch.equal(found, torch.full_like(query, 100.0))


def test_it_writes_through_strides(attention: Attention) -> None:
    """Engines pass a view of the fused projection as the query."""
    generator = torch.Generator().manual_seed(2)
    cache = torch.randn(2, 32, 2, 64, generator=generator).to(torch.bfloat16)
    fused = torch.randn(9, 4 * 64 + 5 * 64, generator=generator).to(torch.bfloat16)
    query = fused[:, : 4 * 64].view(9, 4, 64)
    table, positions = torch.tensor([1, 0], dtype=torch.int32), torch.arange(3, 57, 6, dtype=torch.int32)
    expected = attention(query.contiguous(), cache, cache, table, positions, scale=0.125)
    assert torch.equal(attention(query, cache, cache, table, positions, scale=0.125), expected)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((16, 8, 64, 32), True),
        ((33, 1, 64, 32), False),
        ((4, 2, 80, 32), False),
        ((4, 2, 512, 32), False),
        ((4, 2, 64, 16), False),
    ],
)
def test_shapes_it_supports(shape: tuple[int, int, int, int], expected: bool) -> None:
    assert native.packed_supports(*shape) is expected

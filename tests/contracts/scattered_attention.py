"""Cases and properties that any implementation of scattered attention must satisfy, on any device.

`tests/unit/fusor` runs them in Triton's interpreter, `tests/gpu` on a CUDA device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kintsugi.fusor.attention import reference_attention

Implementation = Callable[..., Tensor]

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference of outputs that are of unit scale: a few roundings of the query's dtype."""

PATTERNS = ("dense", "sparse", "single", "last", "ends")


@dataclass(frozen=True)
class Case:
    """One shape and feature combination; JSON-able."""

    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    block_size: int = 16
    context: int = 150
    pattern: str = "sparse"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    layout: str = "nhd"
    """`nhd` contiguous; `kv_first` and `block_first` are vLLM's stacked K/V; `hnd` heads before slots;
    `mixed` K as in `nhd`, V as in `hnd`."""
    tile: tuple[int, int, int] | None = None
    """Tokens, rows, columns; None for the kernel's own choice."""
    splits: int | None = None
    """Parts of the walk over the context; None for the kernel's own choice."""
    seed: int = 0


@dataclass
class Problem:
    """The arguments of one call."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    positions: Tensor
    options: dict[str, Any]

    def solve(self, implementation: Implementation, **extra: Any) -> Tensor:
        return implementation(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.positions,
            **self.options,
            **extra,
        )

    def fill(self, first: int, end: int, value: float) -> None:
        """Overwrite K and V at sequence positions `[first, end)`, whatever the block they lie in."""
        size = self.key_cache.shape[1]
        for position in range(first, end):
            block = int(self.block_table[position // size])
            self.key_cache[block, position % size] = value
            self.value_cache[block, position % size] = value


def positions_of(case: Case) -> Tensor:
    """int32 ascending query positions."""
    every = torch.arange(case.context)
    generator = torch.Generator().manual_seed(case.seed)
    chosen = {
        "dense": every,
        "sparse": every[torch.rand(case.context, generator=generator) < 0.2],
        "single": every[case.context // 3 : case.context // 3 + 1],
        "last": every[-1:],
        "ends": every[[0, 1, case.context // 2, case.context - 2]],
    }[case.pattern]
    return chosen.to(torch.int32)


def empty_caches(case: Case, num_blocks: int, device: str) -> tuple[Tensor, Tensor]:
    """K and V caches `[blocks, block_size, kv_heads, head_dim]` of the case's memory layout, zeroed."""
    size, heads, dim = case.block_size, case.kv_heads, case.head_dim
    dtype = getattr(torch, case.dtype)
    if case.layout == "kv_first":
        both = torch.zeros(2, num_blocks, size, heads, dim, device=device).to(dtype)
        return both[0], both[1]
    if case.layout == "block_first":
        both = torch.zeros(num_blocks, 2, size, heads, dim, device=device).to(dtype)
        return both[:, 0], both[:, 1]
    contiguous = torch.zeros(num_blocks, size, heads, dim, device=device).to(dtype)
    both = torch.zeros(num_blocks, heads, size, 2, dim, device=device).to(dtype)
    key, value = both[..., 0, :].transpose(1, 2), both[..., 1, :].transpose(1, 2)
    if case.layout == "hnd":
        return key, value
    return contiguous, (value if case.layout == "mixed" else torch.zeros_like(contiguous))


def problem_of(case: Case, device: str) -> Problem:
    """Random tensors: blocks shuffled among twice as many, all unused memory NaN."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    used = -(-case.context // case.block_size)
    table = torch.randperm(2 * used, generator=generator)[:used].to(torch.int32)
    positions = positions_of(case)
    heads = case.kv_heads * case.group
    caches = empty_caches(case, 2 * used, device)
    for cache in caches:
        cache.copy_(torch.full(cache.shape, float("nan"), device=device).to(cache.dtype))
        rows = torch.randn(used * case.block_size, case.kv_heads, case.head_dim, generator=generator)
        rows = rows.view(used, case.block_size, case.kv_heads, case.head_dim)
        for index, block in enumerate(table.tolist()):
            cache[block] = rows[index].to(device).to(cache.dtype)
    query = torch.randn(len(positions), heads, case.head_dim, generator=generator) * 2.0
    options = {
        "scale": case.head_dim**-0.5,
        "sliding_window": case.window,
        "softcap": case.softcap,
        "sinks": torch.randn(heads, generator=generator).to(device) if case.sinks else None,
    }
    problem = Problem(
        query.to(getattr(torch, case.dtype)).to(device),
        *caches,
        table.to(device),
        positions.to(device),
        options,
    )
    problem.fill(case.context, used * case.block_size, float("nan"))
    return problem


def matches_reference(implementation: Implementation, case: Case, device: str, **extra: Any) -> float:
    """Largest difference from the reference. NaN lies in every block that is not the sequence's."""
    problem = problem_of(case, device)
    found = problem.solve(implementation, **extra)
    assert found.dtype == problem.query.dtype
    assert found.shape == problem.query.shape
    return float((found.float() - problem.solve(reference_attention).float()).abs().max())


def never_reads_ahead(implementation: Implementation, case: Case, device: str, **extra: Any) -> float:
    """0.0 if each prefix of the queries is bitwise indifferent to NaN behind its last position."""
    problem = problem_of(case, device)
    worst = 0.0
    for count in {1, len(problem.positions) // 2 + 1, len(problem.positions)}:
        part = dataclasses.replace(
            problem,
            query=problem.query[:count],
            positions=problem.positions[:count],
            key_cache=problem.key_cache.clone(),
            value_cache=problem.value_cache.clone(),
        )
        clean = part.solve(implementation, **extra)
        part.fill(int(part.positions[-1]) + 1, case.context, float("nan"))
        poisoned = part.solve(implementation, **extra)
        assert bool(torch.isfinite(poisoned).all())
        worst = max(worst, float((clean.float() - poisoned.float()).abs().max()))
    return worst


def ignores_the_future(implementation: Implementation, case: Case, device: str, **extra: Any) -> float:
    """0.0 if changing K/V in the middle leaves every earlier query of the same call bitwise alone."""
    problem = problem_of(case, device)
    clean = problem.solve(implementation, **extra)
    middle = len(problem.positions) // 2
    position = int(problem.positions[middle])
    problem.fill(position, position + 1, 50.0)
    changed = problem.solve(implementation, **extra)
    assert not torch.equal(clean[middle], changed[middle])
    if middle == 0:
        return 0.0
    return float((clean[:middle].float() - changed[:middle].float()).abs().max())


def forgets_behind_the_window(implementation: Implementation, case: Case, device: str, **extra: Any) -> float:
    """0.0 if NaN wherever no query's window reaches (dropped blocks hold anything) changes nothing."""
    assert case.window is not None
    problem = problem_of(case, device)
    clean = problem.solve(implementation, **extra)
    reached = set[int]()
    for position in problem.positions.tolist():
        reached |= set(range(max(position - case.window + 1, 0), position + 1))
    for position in set(range(case.context)) - reached:
        problem.fill(position, position + 1, float("nan"))
    changed = problem.solve(implementation, **extra)
    assert bool(torch.isfinite(changed).all())
    return float((clean.float() - changed.float()).abs().max())


CHECKS: dict[str, Callable[..., float]] = {
    check.__name__: check
    for check in (matches_reference, never_reads_ahead, ignores_the_future, forgets_behind_the_window)
}

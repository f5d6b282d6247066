"""The cases of scattered attention that a GPU must pass: `tests/gpu` runs all of them, `make gpu` some."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from kintsugi.fusor.attention import attend_scattered
from tests.contracts.scattered_attention import (
    PATTERNS,
    Case,
    Implementation,
    forgets_behind_the_window,
    ignores_the_future,
    never_reads_ahead,
)

MISTRAL_7B_CASE = Case(kv_heads=8, group=4, head_dim=128, context=700, dtype="bfloat16")
LLAMA_70B_CASE = Case(kv_heads=8, group=8, head_dim=128, context=700, dtype="bfloat16")
SHAPES = {"mistral-7b": MISTRAL_7B_CASE, "llama-70b": LLAMA_70B_CASE}
VARIANTS: dict[str, dict[str, object]] = {
    **{pattern: {"pattern": pattern} for pattern in PATTERNS},
    **{f"{pattern}-window": {"pattern": pattern, "window": 100} for pattern in PATTERNS},
    **{layout: {"layout": layout} for layout in ("kv_first", "block_first", "hnd", "mixed")},
    "block-32": {"block_size": 32},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "everything": {"softcap": 30.0, "sinks": True, "window": 100, "layout": "hnd"},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    **{f"head-dim-{dim}": {"head_dim": dim} for dim in (32, 64, 80, 256)},
    **{f"group-{group}": {"group": group, "kv_heads": 2} for group in (1, 3)},
    "long": {"context": 8192},
    **{f"rank-of-8-{n}": {"kv_heads": 1, "context": n} for n in (700, 8192, 32768)},
    **{f"splits-{n}": {"kv_heads": 1, "context": 2000, "sinks": True, "splits": n} for n in (1, 4, 16)},
}


def variant_of(shape: Case, name: str) -> Case:
    """The shape with the features that `VARIANTS` names."""
    return dataclasses.replace(shape, **VARIANTS[name])  # type: ignore[arg-type]


MASKS: dict[str, tuple[Callable[..., float], Case]] = {
    **{
        f"{check.__name__} {name}{' window' if window else ''}": (
            check,
            dataclasses.replace(shape, window=window),
        )
        for check in (never_reads_ahead, ignores_the_future)
        for name, shape in SHAPES.items()
        for window in (None, 100)
    },
    "forgets_behind_the_window mistral-7b": (
        forgets_behind_the_window,
        dataclasses.replace(MISTRAL_7B_CASE, window=9, pattern="ends"),
    ),
}
"""Checks that masks are strict, which must find 0.0."""


def implementation_of(case: Case, device: str) -> Implementation:
    """What a blend calls; on a GPU, with the case's number of splits where it names one."""
    if case.splits is None or device == "cpu":
        return attend_scattered
    from kintsugi.fusor.kernels.scattered import triton_attention

    return functools.partial(triton_attention, splits=case.splits)

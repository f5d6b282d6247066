"""Scattered attention: the Triton kernel in the interpreter against the reference, the reference itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kintsugi.fusor.attention import attend_scattered, reference_attention
from kintsugi.fusor.kernels.scattered import Tile, choose_splits, variant_sizes
from tests.contracts.scattered_attention import PATTERNS, TOLERANCE, Case, problem_of

REPOSITORY = Path(__file__).parents[3]
Verdict = Callable[[str, Case], float]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Verdict]:
    """Ask the interpreter's process for a check of a case."""
    paths = os.pathsep.join([str(REPOSITORY / "services"), str(REPOSITORY)])
    worker = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.fusor.interpreter_worker"],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    requests, answers = worker.stdin, worker.stdout

    def ask(check: str, case: Case) -> float:
        requests.write(json.dumps({"check": check, "case": dataclasses.asdict(case)}) + "\n")
        requests.flush()
        line = answers.readline()
        assert line, "the interpreter's process died; its traceback is above"
        answer: float | str = json.loads(line)
        assert isinstance(answer, float), f"{case}: {answer}"
        return answer

    yield ask
    requests.close()
    answers.close()
    assert worker.wait(timeout=60) == 0


MATRIX = [
    *(Case(group=group, head_dim=dim) for group in (1, 3, 4, 8) for dim in (32, 64, 80, 128)),
    *(
        Case(pattern=pattern, block_size=size, window=window, context=90, tile=(4, 16, 16))
        for pattern, size, window in itertools.product(PATTERNS, (16, 32), (None, 40))
    ),
    Case(softcap=5.0),
    Case(softcap=5.0, window=33, sinks=True),
    Case(sinks=True, group=8, pattern="ends"),
    Case(window=1),
    Case(window=1000),
    Case(dtype="float16"),
    Case(dtype="bfloat16"),
    Case(dtype="float16", window=50),
    Case(dtype="bfloat16", softcap=20.0, sinks=True),
    *(Case(layout=layout) for layout in ("kv_first", "block_first", "hnd", "mixed")),
    Case(tile=(1, 16, 16), pattern="ends"),
    # One rank's share of Mistral-7B and Llama-70B on eight GPUs, and of Llama-70B on four.
    *(Case(kv_heads=heads, group=group, head_dim=128, context=300, dtype="bfloat16", splits=splits)
      for heads, group in ((1, 4), (1, 8), (2, 8)) for splits in (1, 4)),
    *(Case(kv_heads=1, pattern=pattern, context=90, tile=(4, 16, 16), splits=splits, window=window)
      for pattern in PATTERNS for splits, window in ((2, None), (16, None), (4, 40))),
    Case(kv_heads=1, splits=4, softcap=5.0, sinks=True, window=33, tile=(2, 16, 16)),
    Case(kv_heads=1, splits=8, sinks=True, layout="hnd", head_dim=80),
]  # fmt: skip


def _name(case: Case) -> str:
    differences = {k: v for k, v in dataclasses.asdict(case).items() if v != getattr(Case(), k)}
    return ",".join(f"{key}={value}" for key, value in differences.items()) or "default"


@pytest.mark.parametrize("case", MATRIX, ids=_name)
def test_kernel_matches_reference(interpreted: Verdict, case: Case) -> None:
    assert interpreted("matches_reference", case) <= TOLERANCE[case.dtype]


FEATURES = [
    Case(),
    Case(tile=(4, 16, 16)),
    Case(window=25, tile=(8, 32, 16)),
    Case(sinks=True, softcap=9.0, layout="hnd", pattern="ends"),
    Case(kv_heads=1, splits=4, tile=(4, 16, 16)),
    Case(kv_heads=1, splits=2, window=25, tile=(8, 32, 16)),
]


@pytest.mark.parametrize("check", ["never_reads_ahead", "ignores_the_future"])
@pytest.mark.parametrize("case", FEATURES, ids=_name)
def test_kernel_masks_by_position(interpreted: Verdict, check: str, case: Case) -> None:
    assert interpreted(check, case) == 0.0


@pytest.mark.parametrize("tile", [None, (4, 16, 16)])
def test_kernel_reads_no_block_behind_every_window(
    interpreted: Verdict, tile: tuple[int, int, int] | None
) -> None:
    case = Case(window=9, pattern="ends", tile=tile)
    assert interpreted("forgets_behind_the_window", case) == 0.0


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(
    case=st.builds(
        Case,
        kv_heads=st.integers(1, 3),
        group=st.integers(1, 9),
        head_dim=st.sampled_from([16, 24, 64]),
        block_size=st.sampled_from([16, 24, 32]),
        context=st.integers(5, 120),
        pattern=st.sampled_from(["dense", "ends", "last", "single"]),
        window=st.none() | st.integers(1, 130),
        softcap=st.none() | st.floats(1.0, 50.0, width=32),
        sinks=st.booleans(),
        layout=st.sampled_from(["nhd", "kv_first", "block_first", "hnd", "mixed"]),
        tile=st.just((3, 32, 16)) | st.none(),
        splits=st.sampled_from([1, 2, 8]),
        seed=st.integers(0, 1000),
    )
)
def test_kernel_matches_reference_anywhere(interpreted: Verdict, case: Case) -> None:
    assert interpreted("matches_reference", case) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    ("programs", "context", "splits"),
    [
        (1_000, 32_768, 1),  # full without
        (264, 32_768, 1),
        (263, 32_768, 2),
        (39, 8_192, 8),  # 15 % of 8k with one kv head
        (2, 32_768, 16),
        (2, 1_024, 4),  # no part shorter than four steps of 64
        (2, 100, 1),
    ],
)
def test_the_walk_is_split_until_the_device_is_full(programs: int, context: int, splits: int) -> None:
    assert choose_splits(programs, context, columns=64, multiprocessors=132) == splits


@pytest.mark.parametrize("multiprocessors", [1, 48, 132])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (8, 4), (1, 8), (32, 1), (4, 32)])
@pytest.mark.parametrize("row_bytes", [128, 512])
def test_the_sizes_that_are_run_at_start_need_every_variant(
    kv_heads: int, group: int, row_bytes: int, multiprocessors: int
) -> None:
    context_max = 2048

    def variant(num_tokens: int, context: int) -> tuple[Tile, int]:
        """As `triton_attention` chooses it."""
        tile = Tile.choose_tile(num_tokens, group, row_bytes)
        programs = -(-num_tokens // tile.tokens) * kv_heads
        return tile, choose_splits(programs, context, tile.columns, multiprocessors)

    at_start = {variant(*size) for size in variant_sizes(group, row_bytes, context_max)}
    tokens, contexts = [*range(1, 140), 300, 2000], range(64, context_max + 1, 64)
    assert {variant(count, context) for count in tokens for context in contexts} <= at_start


def _by_hand(problem: Any, index: int) -> torch.Tensor:
    """One query, one position at a time, in float64."""
    options, position = problem.options, int(problem.positions[index])
    window = options["sliding_window"] or position + 1
    size, group = problem.key_cache.shape[1], problem.query.shape[1] // problem.key_cache.shape[2]
    rows = []
    for head in range(problem.query.shape[1]):
        logits, values = [], []
        for j in range(max(position - window + 1, 0), position + 1):
            block = int(problem.block_table[j // size])
            key = problem.key_cache[block, j % size, head // group].double()
            values.append(problem.value_cache[block, j % size, head // group].double())
            logit = (problem.query[index, head].double() @ key) * options["scale"]
            cap = options["softcap"]
            logits.append(logit if cap is None else cap * torch.tanh(logit / cap))
        weights = torch.stack(logits).exp()
        sink = 0.0 if options["sinks"] is None else options["sinks"][head].double().exp()
        rows.append((weights / (weights.sum() + sink)) @ torch.stack(values))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "case",
    [
        Case(context=40),
        Case(context=40, window=7, softcap=3.0),
        Case(context=40, sinks=True, group=3, layout="hnd"),
    ],
    ids=_name,
)
def test_reference_matches_a_loop_over_positions(case: Case) -> None:
    problem = problem_of(case, "cpu")
    found = problem.solve(reference_attention)
    for index in range(len(problem.positions)):
        assert torch.allclose(found[index].double(), _by_hand(problem, index), atol=1e-5)


def test_a_cpu_runs_the_reference() -> None:
    problem = problem_of(Case(), "cpu")
    assert torch.equal(problem.solve(attend_scattered), problem.solve(reference_attention))


def test_no_queries_give_no_output() -> None:
    problem = problem_of(Case(), "cpu")
    problem.query, problem.positions = problem.query[:0], problem.positions[:0]
    assert problem.solve(attend_scattered).shape == problem.query.shape


@pytest.mark.parametrize(
    "changes",
    [
        {"query": torch.zeros(3, 7, 64), "positions": torch.arange(3, dtype=torch.int32)},
        {"query": torch.zeros(3, 8, 64).double(), "positions": torch.arange(3).int()},
        {"key_cache": torch.zeros(20, 16, 2, 64).half()},
        {"value_cache": torch.zeros(20, 16, 2, 32)},
        {"block_table": torch.arange(10)},
        {"positions": torch.arange(2, dtype=torch.int32)},
        {"options": {"scale": 1.0, "sinks": torch.zeros(3)}},
    ],
)
def test_arguments_that_do_not_fit_never_reach_the_kernel(changes: dict[str, Any]) -> None:
    problem = dataclasses.replace(problem_of(Case(), "cpu"), **changes)
    with pytest.raises(AssertionError):
        problem.solve(attend_scattered)

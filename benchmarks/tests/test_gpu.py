"""`make gpu` works, as far as that shows without a GPU: every section at tiny shapes, on a bare machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import device as benchmark

REPOSITORY = Path(__file__).parents[2]
WITHOUT = """
import importlib.abc, runpy, sys
sys.path.insert(0, {repository!r})

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Refuse())
sys.argv = ["device.py", "--dry", "--output", {output!r}]
runpy.run_path({script!r}, run_name="__main__")
"""
BLOCKED = ["vllm", "ray", "lmdb", "blake3", "pydantic", "grpc", "google", "aiohttp", "fastapi", "starlette"]
BLOCKED += ["prometheus_client", "transformers", "tokenizers", "safetensors", "yaml", "opentelemetry"]
"""What a machine with torch and Triton may lack."""


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result file of a dry run in an interpreter that has nothing of ours installed."""
    output = tmp_path_factory.mktemp("gpu") / "gpu.json"
    script = WITHOUT.format(
        repository=str(REPOSITORY),
        blocked=BLOCKED,
        output=str(output),
        script=str(REPOSITORY / "benchmarks" / "gpu" / "device.py"),
    )
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd="/", env=bare, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_every_section_runs_on_a_bare_machine(dry: dict[str, Any]) -> None:
    assert dry["holds"]
    assert dry["machine"]["stand_ins"] == ["blake3", "pydantic"]
    assert dry["dry"]
    for name in ("kernel", "codecs", "loading", "counted", "pass"):
        assert dry["sections"][name]["rows"], name


def test_no_selection_waits_or_copies_from_pageable_memory(dry: dict[str, Any]) -> None:
    rows = dry["sections"]["counted"]["rows"]
    assert {row["selection"] for row in rows} == set(benchmark.SELECTIONS)
    for row in rows:
        assert row["device_syncs_per_layer"] == 0, row
        assert row["pageable_copies_per_layer"] == 0, row


def test_a_blend_that_recomputes_everything_is_the_dense_prefill(dry: dict[str, Any]) -> None:
    first = dry["sections"]["pass"]["rows"][0]
    assert first["r1_max_abs_difference"] <= 1e-5
    assert first["largest_key"] > 0.1


def test_a_section_that_breaks_does_not_take_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_plan: benchmark.Plan) -> Any:
        raise RuntimeError("out of memory")
        yield

    monkeypatch.setitem(benchmark.SECTIONS, "kernel", broken)
    plan = benchmark.Plan(torch.device("cpu"), {"tiny": benchmark.TINY}, (200,), 1, float("inf"))
    found = {name: benchmark.run_section(name, plan) for name in ("kernel", "codecs")}
    assert found["kernel"]["error"] == "RuntimeError: out of memory"
    assert len(found["codecs"]["rows"]) == 5
    assert not benchmark.holds(found)


def test_nothing_is_begun_when_no_time_is_left() -> None:
    plan = benchmark.Plan(torch.device("cpu"), {"tiny": benchmark.TINY}, (200,), 1, deadline_s=0.0)
    found = benchmark.run_section("codecs", plan)
    assert len(found["rows"]) == 1
    assert "no time" in found["skipped"]


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["device"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        benchmark.main()

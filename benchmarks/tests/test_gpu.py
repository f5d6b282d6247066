"""`make gpu` works, as far as that shows without a GPU: every section at tiny shapes, on a bare machine."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import bare, blending
from benchmarks.gpu import device as benchmark
from benchmarks.gpu.counting import count_per_layer
from benchmarks.support import device_waits
from kintsugi.core.errors import Corrupted
from kintsugi.core.layout import Codec
from kintsugi.fusor.selectors import HkvdSelector
from tests.contracts.scattered_on_device import implementation_of

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
BLOCKED += ["xxhash", "rich", "pydantic_core"]
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
    return {**found, "said": ran.stdout}


def test_every_section_runs_on_a_bare_machine(dry: dict[str, Any]) -> None:
    assert dry["holds"]
    assert dry["finished"]
    assert dry["config"]["stand_ins"] == ["blake3", "xxhash", "pydantic", "pydantic_core"]
    assert not dry["config"]["verifies_frames"]
    assert dry["config"]["dry"]
    for name in benchmark.GROUPS["parts"]:
        assert dry["sections"][name]["rows"], name
        assert "missing" not in dry["sections"][name]
    for name in benchmark.GROUPS["engine"]:
        assert f"{name}: skipped: vLLM needs a GPU\n" in dry["said"]


def test_no_selection_waits_or_copies_from_pageable_memory(dry: dict[str, Any]) -> None:
    rows = dry["sections"]["counted"]["rows"]
    assert {row["selection"] for row in rows} == set(blending.SELECTIONS)
    for row in rows:
        assert row["device_syncs_per_layer"] == 0, row
        assert row["pageable_copies_per_layer"] == 0, row


def test_a_blend_that_recomputes_everything_is_the_dense_prefill(dry: dict[str, Any]) -> None:
    first = dry["sections"]["pass"]["rows"][0]
    assert first["r1_max_abs_difference"] <= 1e-5
    assert first["largest_key"] > 0.1


def test_what_a_blend_is_read_as_by_the_documentation(dry: dict[str, Any]) -> None:
    """The benchmarks' page reads these fields of every result."""
    assert dry["benchmark"] == "gpu"
    assert {"machine", "date", "sections"} <= set(dry["config"])
    figures = {figure["name"]: figure for figure in dry["figures"]}
    assert figures["gpu_failures"]["value"] == 0
    assert "hybrid r=.15: " in figures["gpu_pass_speedup_tiny_200"]["detail"]


def plan_of(deadline_s: float = float("inf")) -> benchmark.Plan:
    return benchmark.Plan(torch.device("cpu"), {"tiny": blending.TINY}, (200,), 1, deadline_s)


def run_sections(*names: str, plan: benchmark.Plan | None = None) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for name in names:
        benchmark.run_section(name, plan or plan_of(), sections)
    return sections


def test_a_section_that_breaks_does_not_take_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_plan: benchmark.Plan) -> Any:
        raise RuntimeError("out of memory")
        yield

    monkeypatch.setitem(benchmark.SECTIONS, "kernel", broken)
    found = run_sections("kernel", "codecs")
    assert found["kernel"]["error"] == "RuntimeError: out of memory"
    assert len(found["codecs"]["rows"]) == len(Codec)
    failures, missing = benchmark.figures_of(found)
    assert (failures.value, failures.holds) == (1, False)
    required = benchmark.required_rows(plan_of())["kernel"]
    assert (missing.value, missing.holds) == (len(required), False)


def test_a_case_of_the_kernel_that_breaks_does_not_take_the_others_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(case: Any, device: str) -> Any:
        if case.head_dim == 256:
            raise RuntimeError("out of resource: shared memory")
        return implementation_of(case, device)

    monkeypatch.setattr(benchmark, "implementation_of", broken)
    rows = {row["row"]: row for row in benchmark.kernel_rows(plan_of())}
    assert rows["head-dim-256"]["error"] == "RuntimeError: out of resource: shared memory"
    assert [name for name, row in rows.items() if not row["holds"]] == ["head-dim-256"]
    assert {"fp16", "head-dim-80", "group-3", "never_reads_ahead llama-70b"} <= set(rows)


def test_nothing_is_begun_when_no_time_is_left() -> None:
    found = run_sections("codecs", plan=plan_of(deadline_s=0.0))
    assert found["codecs"]["rows"] == []
    assert found["codecs"]["skipped"] == "the rest: 0 s were left"


def test_a_length_is_left_out_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def minute(_shape: Any, context: int, *_: Any) -> Iterator[dict[str, Any]]:
        nonlocal now_s
        now_s += 60.0
        yield {"context": context, "selection": "r=0"}

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(blending, "measure_exactness", lambda *_: {})
    monkeypatch.setattr(blending, "measure_pass", minute)
    for deadline_s, lengths in ((239.0, [100]), (241.0, [100, 200])):
        now_s = 0.0
        plan = dataclasses.replace(plan_of(deadline_s), contexts=(100, 200, 400))
        found = run_sections("pass", plan=plan)["pass"]
        assert [row["context"] for row in found["rows"]] == [100, *lengths]
        assert found["skipped"].startswith("the rest: ")


@pytest.fixture(autouse=True)
def nothing_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in .gpu."""
    monkeypatch.setattr(benchmark, "unpack_site", lambda: None)


def lines_of(arguments: list[str], limit_s: float) -> tuple[int | None, list[str]]:
    with benchmark.running_python(arguments, limit_s) as process:
        assert process.stdout is not None
        lines = process.stdout.readlines()
    return process.returncode, lines


def test_a_part_with_vllm_has_its_own_process_path_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    status, (path,) = lines_of(["-c", "import os; print(os.environ['PYTHONPATH'])"], 50.0)
    assert status == 0
    assert path.strip().split(os.pathsep)[0] == str(REPOSITORY)
    assert path.strip().endswith(f"{os.pathsep}/theirs")
    status, _ = lines_of(["-c", "import signal; signal.pause()"], 0.1)
    assert status == -signal.SIGKILL


PRINTED = {
    "row": "8192 query r=0.15",
    "shape": "8b",
    "context": 8192,
    "selection": "query r=.15",
    "speedup": 3.0,
}
ITL = {"row": "itl", "share": 0.5}


@pytest.mark.parametrize(
    ("ending", "kept"),
    [
        ("", {}),
        ("signal.pause()", {"error": f"RuntimeError: exit status {-signal.SIGKILL} within "}),
        ("raise SystemExit(3)", {"error": "RuntimeError: exit status 3 within "}),
    ],
)
def test_what_vllm_measured_is_kept_however_it_ends(
    ending: str, kept: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"print('{text}', flush=True)" for text in ("INFO", json.dumps(PRINTED), json.dumps(ITL))]
    code = "\n".join(["import signal", *lines, ""])
    running = benchmark.running_python
    monkeypatch.setattr(
        benchmark, "running_python", lambda _, limit_s: running(["-c", code + ending], limit_s)
    )
    monkeypatch.setitem(benchmark.LIMITS_S, "ttft", 3.0)
    monkeypatch.setattr(benchmark, "find_vllm", lambda: "0.32.0")
    monkeypatch.setattr(benchmark.Plan, "is_dry", False)
    found = run_sections("ttft")
    figures = {figure.name: figure for figure in benchmark.figures_of(found)}
    assert figures["gpu_ttft_speedup_8b_8192"].value == 3.0
    assert figures["gpu_itl_share"].holds
    assert figures["gpu_failures"].holds is not bool(kept)
    section = found["ttft"]
    assert section.pop("rows") == [PRINTED, ITL]
    assert {name: text[: len(kept.get(name, ""))] for name, text in section.items()} == kept


def test_a_missing_vllm_does_not_pass_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_version_of", lambda _package: None)
    monkeypatch.setattr(benchmark.Plan, "is_dry", False)
    found = run_sections("exact")
    assert "make gpu-pack" in found["exact"]["skipped"]
    assert found["exact"]["missing"][0] == "FLASH_ATTN r=1"
    missing = {figure.name: figure for figure in benchmark.figures_of(found)}["gpu_rows_missing"]
    assert (missing.value, missing.holds) == (6, False)


def test_a_required_row_without_a_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_row(_plan: benchmark.Plan) -> Iterator[dict[str, Any]]:
        yield {"row": "raw", "holds": True}

    monkeypatch.setitem(benchmark.SECTIONS, "codecs", one_row)
    found = run_sections("codecs")
    assert "int8" in found["codecs"]["missing"]
    assert "raw" not in found["codecs"]["missing"]


def test_every_row_is_written_when_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"

    def killed(_plan: benchmark.Plan) -> Iterator[dict[str, Any]]:
        yield {"codec": "raw", "holds": True}
        raise KeyboardInterrupt

    monkeypatch.setitem(benchmark.SECTIONS, "codecs", killed)
    monkeypatch.setattr(
        sys, "argv", ["device", "--dry", "--sections", "codecs", "pass", "--output", str(output)]
    )
    with pytest.raises(KeyboardInterrupt):
        benchmark.main()
    found = json.loads(output.read_text())
    assert not found["finished"]
    assert found["sections"] == {"codecs": {"rows": [{"codec": "raw", "holds": True}]}}


def test_a_blend_that_waits_inside_a_layer_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blending, "count_waits", lambda run, _device: (run(), 2))
    selections = {"r=0": blending.SELECTIONS["r=0"]}
    plan = plan_of()
    (measured,) = blending.measure_pass(blending.TINY, 200, selections, plan.device, 1)
    row = {"shape": "tiny", **measured}
    assert (row["waits_a_pass"], row["holds"]) == (2, False)
    failures, _, waits = benchmark.figures_of({"pass": {"rows": [row]}})[:3]
    assert (failures.holds, waits.name, waits.value, waits.holds) == (False, "gpu_waits_a_pass", 2, False)


def test_what_torch_says_of_its_own_mode_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "warn": "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
        "operations"
    }
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", lambda mode: warnings.warn(said.get(mode, ""), stacklevel=1)
    )

    def run() -> str:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally.)", stacklevel=1)
        return "done"

    assert blending.count_waits(run, torch.device("cuda")) == ("done", 1)


def test_frames_are_verified_where_xxhash_is_there() -> None:
    prompt = blending.prompt_of(blending.TINY, 200, Codec.RAW, "float32")
    keys = list(prompt.frames)
    assert len(list(prompt.stream(keys, range(3)))) == 3 * len(keys)
    frame = prompt.frames[keys[1]]
    frame[0] ^= 1
    with pytest.raises(Corrupted, match="layer 0"):
        list(prompt.stream(keys, range(3)))


def test_what_stands_in_for_xxhash_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module

    def refused(name: str) -> Any:
        if name == "xxhash":
            raise ImportError(name)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", refused)
    monkeypatch.setitem(sys.modules, "xxhash", sys.modules["xxhash"])
    assert bare.prepare_imports() == ["xxhash"]
    assert sys.modules["xxhash"].xxh3_128_digest(b"one") == bytes(16)


def test_a_wait_in_every_layer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = HkvdSelector.scores

    def waiting(self: HkvdSelector, layer: int, candidates: Any) -> Any:
        found = scores(self, layer, candidates)
        float(found.sum())
        return found

    monkeypatch.setattr(HkvdSelector, "scores", waiting)
    assert count_per_layer(blending.SELECTIONS["gradual@1 r=.15"]) == (1.0, 0.0)
    assert count_per_layer(blending.SELECTIONS["query r=.15"]) == (0.0, 0.0)


def test_the_figures_of_waits_are_those_of_the_worst_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_waits, "count_per_layer", lambda selection: (float(selection.ratio > 0), 0.0))
    waits, copies = device_waits.measure(quick=False)
    assert (waits.name, waits.value, waits.bar, waits.holds) == ("device_syncs_per_layer", 1.0, "≤ 0", False)
    assert (copies.name, copies.value, copies.holds) == ("pageable_copies_per_layer", 0.0, True)


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["device"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        benchmark.main()

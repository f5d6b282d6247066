"""The command line over a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kintsugi
from kintsugi.cli.main import app
from kintsugi.models.passages import read_bundled_passages
from tests.fakes.random_models.factory import make_checkpoint
from tests.fakes.random_models.shapes import find_shape
from tests.integration.engine.conftest import EngineSlot

pytestmark = pytest.mark.engine

SOURCES = Path(kintsugi.__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    return make_checkpoint(find_shape("tiny-llama"), tmp_path_factory.mktemp("model"))


def kintsugi_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what a user's script would see."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-c", "from kintsugi.cli.console_script import main; main()", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_generate_blends_and_keeps_stdout_clean(model: Path, tmp_path: Path) -> None:
    chunks = []
    for index, passage in enumerate(read_bundled_passages()[:3]):
        path = tmp_path / f"{index}.txt"
        path.write_text(passage.text[:800], encoding="utf-8")
        chunks += ["--chunk", str(path)]
    result = kintsugi_command(
        *("generate", "--model", str(model), "--question", "Why?", "--max-tokens", "4"),
        *("--ratio", "1", "--compare", "--json", "--quality", "off", *chunks),
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["accounting"]["outcome"] == "blended"
    assert document["accounting"]["chunks_hit"] == 3
    full, prefix, _, blend = document["methods"]
    assert blend["token_ids"] == full["token_ids"], "ratio 1 is full prefill"
    assert prefix["cost"] < 1 == full["cost"]
    assert "INFO" not in result.stderr, "the engine's log is not for the terminal"


@pytest.mark.filterwarnings("ignore")
def test_doctor_runs_the_self_test(model: Path, engine_slot: EngineSlot) -> None:
    engine_slot.close()
    result = CliRunner().invoke(app, ["doctor", "--model", str(model), "--json"])
    document = json.loads(result.stdout)
    verdicts = {check["name"]: check for check in document["checks"]}
    assert verdicts["vllm hooks"]["verdict"] == "ok", verdicts["vllm hooks"]
    assert verdicts["self-test"]["verdict"] == "ok", verdicts["self-test"]
    assert result.exit_code == 0

"""Where a calibration report comes from before anything is measured."""

from __future__ import annotations

import dataclasses
import shutil
import uuid
from pathlib import Path

import pytest

from kintsugi.core.deploy import ModelSpec
from kintsugi.core.errors import Corrupted, Unavailable
from kintsugi.core.report import CalibrationReport
from kintsugi.models.bundled import bundled_checkpoint, bundled_report
from kintsugi.quality import reports
from kintsugi.serving import calibration
from kintsugi.serving.calibration import publish_shipped, questions_file
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.interface import ChunkStore


@pytest.fixture
def store_url() -> str:
    return f"ram://calibration-{uuid.uuid4().hex}"


BINDING = reports.read(bundled_report()).binding


def test_the_report_beside_the_checkpoint_is_published_once(store_url: str) -> None:
    model = ModelSpec(str(bundled_checkpoint()))
    assert publish_shipped(model, store_url, BINDING)
    published = reports.fetch_report(open_store(store_url), BINDING)
    assert published == reports.read(bundled_report())
    assert not publish_shipped(model, store_url, BINDING)


def test_a_store_that_is_starting_is_asked_again(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, refusals = reports.publish_shipped, iter([Unavailable("no shard answers")] * 2)

    def starting(store: ChunkStore, report: CalibrationReport) -> bool:
        for refusal in refusals:
            raise refusal
        return publish(store, report)

    monkeypatch.setattr(reports, "publish_shipped", starting)
    monkeypatch.setattr(calibration, "PUBLISH_RETRY_S", 0.0)
    model = ModelSpec(str(bundled_checkpoint()))
    with pytest.raises(Unavailable):
        publish_shipped(model, store_url, BINDING)
    assert publish_shipped(model, store_url, BINDING, patience_s=60.0)


def test_what_the_store_says_stays(store_url: str) -> None:
    """A calibration that drift has tripped must not be undone by a restart."""
    tripped = reports.read(bundled_report()).as_tripped("drift", "2026-01-01T00:00:00Z")
    reports.publish(open_store(store_url), tripped)
    assert not publish_shipped(ModelSpec(str(bundled_checkpoint())), store_url, BINDING)
    assert reports.fetch_report(open_store(store_url), BINDING) == tripped


def test_a_report_about_other_engines_is_left_alone(store_url: str, tmp_path: Path) -> None:
    other = dataclasses.replace(BINDING, vllm="0.0.1")
    assert not publish_shipped(ModelSpec(str(bundled_checkpoint())), store_url, other)
    assert not publish_shipped(ModelSpec(str(tmp_path)), store_url, BINDING)
    assert reports.fetch_report(open_store(store_url), BINDING) is None


def test_a_broken_report_is_said_so(store_url: str, tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text("[")
    with pytest.raises(Corrupted):
        publish_shipped(ModelSpec(str(tmp_path)), store_url, BINDING)


def test_questions_are_the_configured_ones_else_those_beside_the_checkpoint(tmp_path: Path) -> None:
    model = ModelSpec(str(tmp_path))
    assert questions_file(model) is None
    shutil.copy(bundled_checkpoint() / "questions.jsonl", tmp_path)
    assert questions_file(model) == tmp_path / "questions.jsonl"

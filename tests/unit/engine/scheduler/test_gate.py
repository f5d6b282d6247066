"""The gate's reading: at start, on change, when the store is away. What documents mean is `core.gate`'s."""

from __future__ import annotations

import dataclasses
import logging
import threading
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kintsugi.core.errors import BelowMinimum, Unavailable
from kintsugi.core.report import Binding
from kintsugi.core.request import BlendOptions
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.scheduler import gate as gate_module
from kintsugi.engine.scheduler.gate import Gate, StoreReports, open_gate, read_report_file
from kintsugi.store.client.ram import RamStore
from tests.unit.core.test_report import BINDING, entry, report

PASSING = report(entry())


class Scripted:
    """A source whose answers are given; an exception is raised."""

    def __init__(self, *answers: bytes | Exception | None) -> None:
        self.answers = list(answers)
        self.asked = threading.Semaphore(0)

    def __call__(self, binding: Binding) -> bytes | None:
        assert binding == BINDING
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.asked.release()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of warning and above. vLLM's own handlers hide them from pytest."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(gate_module.logger, "handlers", [handler])
    monkeypatch.setattr(gate_module.logger, "level", logging.INFO)
    return lines


def test_a_new_report_opens_and_a_tripped_one_closes() -> None:
    gate = Gate(
        Scripted(None, PASSING.to_bytes(), PASSING.as_tripped("KL rose", "now").to_bytes()), BINDING, 1.0
    )
    reasons = []
    for _ in range(3):
        gate.refresh()
        reasons.append(gate.state.reason)
    assert reasons == ["not_calibrated", None, "drift"]


def test_nothing_is_blended_before_the_first_answer(log: list[str]) -> None:
    gate = Gate(Scripted(Unavailable("no route")), BINDING, 1.0)
    assert gate.state.reason == "not_calibrated"
    for _ in range(3):
        gate.refresh()
    assert gate.state.reason == "report_unavailable"
    assert len(log) == 1, "one line, not one per poll"


def test_an_unreachable_store_is_no_drift() -> None:
    gate = Gate(Scripted(PASSING.to_bytes(), Unavailable("gone"), OSError("gone")), BINDING, 1.0)
    for _ in range(3):
        gate.refresh()
        assert gate.state.is_open


def test_a_closed_gate_says_once_what_to_run(log: list[str]) -> None:
    gate = Gate(Scripted(None), BINDING, 1.0)
    gate.refresh()
    gate.refresh()
    assert len(log) == 1
    assert "kintsugi calibrate" in log[0]


def test_the_report_is_polled_until_the_gate_is_closed() -> None:
    source = Scripted(None, None, PASSING.to_bytes())
    gate = Gate(source, BINDING, 0.001).start()
    for _ in range(4):
        assert source.asked.acquire(timeout=30)
    gate.close()
    assert gate.state.is_open
    while source.asked.acquire(blocking=False):
        pass
    assert not source.asked.acquire(timeout=0.05)


def test_a_file_and_a_store_are_read(tmp_path: Path) -> None:
    store = RamStore()
    assert StoreReports(store).read(BINDING) is None
    store.put_report(BINDING.model, BINDING.report_name, PASSING.to_bytes())
    path = tmp_path / "report.json"
    path.write_bytes(PASSING.to_bytes())
    assert StoreReports(store).read(BINDING) == read_report_file(path, BINDING) == PASSING.to_bytes()
    path.write_bytes(b" " * (3 << 20))
    gate = Gate(partial(read_report_file, path), BINDING, 1.0)
    gate.refresh()
    assert gate.state.reason == "calibration_unreadable"
    path.unlink()
    missing = Gate(partial(read_report_file, path), BINDING, 1.0)
    missing.refresh()
    assert missing.state.reason == "report_unavailable"
    assert "calibrate with --out" in missing.state.detail


def test_a_shard_that_missed_a_trip_does_not_open_the_gate_again() -> None:
    """It may be the only one that answers."""
    store = RamStore()
    gate = Gate(StoreReports(store).read, BINDING, 1.0)
    stale, tripped = PASSING.to_bytes(), PASSING.as_tripped("KL rose", "now").to_bytes()
    again = PASSING.created_after(tripped).to_bytes()
    reasons = []
    for document in (stale, tripped, None, stale, again):
        store._reports.clear()
        if document is not None:
            store.put_report(BINDING.model, BINDING.report_name, document)
        gate.refresh()
        reasons.append(gate.state.reason)
    assert reasons == [None, "drift", "not_calibrated", "drift", None]


def test_limits_are_lifted_for_a_while() -> None:
    gate = Gate(Scripted(PASSING.to_bytes(), PASSING.as_tripped("KL rose", "now").to_bytes()), BINDING, 1.0)
    gate.refresh()
    reported = gate.state
    least = PASSING.choice.selection
    assert least is not None
    with pytest.raises(BelowMinimum):
        reported.resolve(least, BlendOptions(ratio=0.0))
    with gate.lift_limits():
        assert gate.state.resolve(least, BlendOptions(ratio=0.0)) == dataclasses.replace(least, ratio=0.0)
    assert gate.state == reported
    with gate.lift_limits():
        gate.refresh()
    assert gate.state.reason == "drift", "what came meanwhile stays"
    with gate.lift_limits():
        assert not gate.state.is_open


def test_allowing_uncalibrated_blending_is_loud(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    store = RamStore()
    told = open_gate(EngineConfig(allow_uncalibrated=True), store, BINDING)
    assert told.state.is_open
    assert told.state.limits is None
    told.refresh()
    assert told.state.is_open
    monkeypatch.setenv("KINTSUGI_ALLOW_UNCALIBRATED", "1")
    assert open_gate(EngineConfig(), store, BINDING).state.is_open
    assert len(log) == 2
    assert all("NOT CALIBRATED" in line for line in log)
    monkeypatch.delenv("KINTSUGI_ALLOW_UNCALIBRATED")
    closed = open_gate(EngineConfig(), store, BINDING)
    closed.close()
    assert closed.state.reason == "not_calibrated"


def test_an_engine_that_only_saves_asks_for_no_report_and_misses_none(log: list[str]) -> None:
    store = RamStore()
    gate = open_gate(EngineConfig(save_only=True, allow_uncalibrated=True), store, BINDING)
    assert gate.state.reason == "save_only"
    gate.refresh()
    assert gate.state.reason == "save_only"
    assert log == []
    gate.close()

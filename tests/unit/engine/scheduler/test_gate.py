"""The gate's reading: at start, on change, when the store is away. What documents mean is `core.gate`'s."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kintsugi.core.errors import Unavailable
from kintsugi.core.evidence import Quality
from kintsugi.core.gate import summarize
from kintsugi.core.report import Binding, Closing
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.scheduler import gate as gate_module
from kintsugi.engine.scheduler.gate import Gate, ReadReport, StoreReports, open_gate, read_report_file
from kintsugi.store.client.ram import RamStore
from tests.fakes.reports import AT, BINDING, VERSIONS, open_report, part_of

OPEN = open_report()
CLOSED = OPEN.with_part(
    part_of(writer="watcher", closings=[Closing("wrong answers", AT)]), "2026-01-02T00:00:00+00:00"
)


def make_gate(read: ReadReport, poll_s: float = 1.0) -> Gate:
    return Gate(read, BINDING, poll_s, Quality.BALANCED, VERSIONS)


def state_of(gate: Gate) -> str:
    return summarize(gate.state).state


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
    """Logged lines. vLLM's own handlers hide them from pytest."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(gate_module.logger, "handlers", [handler])
    monkeypatch.setattr(gate_module.logger, "level", logging.INFO)
    return lines


def test_evidence_opens_and_a_closing_closes(log: list[str]) -> None:
    gate = make_gate(Scripted(None, OPEN.to_bytes(), CLOSED.to_bytes()))
    states = []
    for _ in range(3):
        gate.refresh()
        states.append(state_of(gate))
    assert states == ["learning", "open", "closed"]
    assert log[1].startswith("Blending is open: prompts of 513 to 2048 tokens with declared chunks: at 50%")
    assert len(log) == 3


def test_nothing_is_blended_before_the_first_answer(log: list[str]) -> None:
    gate = make_gate(Scripted(Unavailable("no route")))
    assert gate.state.reason == "report_unavailable"
    for _ in range(3):
        gate.refresh()
    assert (gate.state.reason, gate.state.detail) == (
        "report_unavailable",
        "no route; it is read again later",
    )
    assert len(log) <= 1, "one line, not one per poll"


def test_an_unreachable_store_changes_nothing() -> None:
    gate = make_gate(Scripted(OPEN.to_bytes(), Unavailable("gone"), OSError("gone")))
    for _ in range(3):
        gate.refresh()
        assert state_of(gate) == "open"


def test_more_evidence_of_the_same_kind_is_not_logged(log: list[str]) -> None:
    more = open_report().with_part(part_of(writer="idle"), "2026-01-02T00:00:00+00:00")
    gate = make_gate(Scripted(OPEN.to_bytes(), more.to_bytes()))
    gate.refresh()
    gate.refresh()
    assert gate.state.report == more
    assert len(log) == 1


def test_the_report_is_polled_until_the_gate_is_closed() -> None:
    source = Scripted(None, None, OPEN.to_bytes())
    gate = make_gate(source, 0.001).start()
    for _ in range(4):
        assert source.asked.acquire(timeout=30)
    gate.close()
    assert state_of(gate) == "open"
    while source.asked.acquire(blocking=False):
        pass
    assert not source.asked.acquire(timeout=0.05)


def test_a_file_and_a_store_are_read(tmp_path: Path) -> None:
    store = RamStore()
    assert StoreReports(store).read(BINDING) is None
    store.put_report(BINDING.model, BINDING.report_name, OPEN.to_bytes())
    path = tmp_path / "report.json"
    path.write_bytes(OPEN.to_bytes())
    assert StoreReports(store).read(BINDING) == read_report_file(path, BINDING) == OPEN.to_bytes()
    path.write_bytes(b" " * (3 << 20))
    gate = make_gate(partial(read_report_file, path))
    gate.refresh()
    assert state_of(gate) == "learning"
    assert "at most 1048576 are read" in gate.state.detail
    path.unlink()
    missing = make_gate(partial(read_report_file, path))
    missing.refresh()
    assert missing.state.reason == "report_unavailable"
    assert "calibrate with --out" in missing.state.detail


def test_a_shard_that_missed_a_closing_does_not_open_the_gate_again() -> None:
    """It may be the only one that answers."""
    store = RamStore()
    gate = make_gate(StoreReports(store).read)
    states = []
    for report in (OPEN, CLOSED, None, OPEN):
        store._reports.clear()
        if report is not None:
            store.put_report(BINDING.model, BINDING.report_name, report.to_bytes())
        gate.refresh()
        states.append(state_of(gate))
    assert states == ["open", "closed", "learning", "closed"]


def test_to_test_nothing_is_loud(log: list[str]) -> None:
    gate = open_gate(EngineConfig(quality=Quality.OFF), RamStore(), BINDING)
    assert gate.is_fixed
    assert state_of(gate) == "off"
    gate.refresh()
    assert state_of(gate) == "off"
    (line,) = log
    assert "BLENDING IS NOT TESTED" in line


def test_an_engine_learns_unless_it_is_told_otherwise() -> None:
    gate = open_gate(EngineConfig(quality=Quality.STRICT), RamStore(), BINDING)
    gate.close()
    assert not gate.is_fixed
    assert (state_of(gate), gate.state.quality, gate.quality) == ("learning", Quality.STRICT, Quality.STRICT)
    assert gate.versions.startswith("kintsugi ")


def test_an_engine_that_only_saves_asks_for_no_report_and_misses_none(log: list[str]) -> None:
    store = RamStore()
    gate = open_gate(EngineConfig(save_only=True, quality=Quality.OFF), store, BINDING)
    assert gate.state.reason == "save_only"
    gate.refresh()
    assert gate.state.reason == "save_only"
    assert log == []
    gate.close()

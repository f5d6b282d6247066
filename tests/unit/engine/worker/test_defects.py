"""What a pass raises ends that pass, and the log says so: in one line where the device has no memory."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from kintsugi.engine.worker import defects
from kintsugi.engine.worker.defects import begin_on_all_ranks, contain_defects

SHORTAGE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 79.15 GiB.")


def contain(error: Exception, monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> list[str]:
    """The reasons that are handed on."""
    monkeypatch.setattr(defects, "rank_and_size", lambda: (0, ranks))
    reasons: list[str] = []
    with contain_defects("blend request-1", reasons.append):
        raise error
    return reasons


def test_a_device_without_memory_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (reason,) = contain(SHORTAGE, monkeypatch)
    assert reason == (
        "device_memory: CUDA out of memory. Tried to allocate 20.00 MiB; lower gpu_memory_utilization, "
        "so that vLLM leaves more to passes"
    )
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert record.getMessage() == f"Failed to blend request-1: {reason}"


def test_any_other_defect_is_logged_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert contain(RuntimeError("a bug"), monkeypatch) == ["defect: RuntimeError: a bug"]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


@pytest.mark.parametrize("error", [SHORTAGE, RuntimeError("a bug")])
def test_several_ranks_do_not_go_on_without_one(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        contain(error, monkeypatch, ranks=2)


def begin(*outcomes: Exception | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str], list[str]]:
    """What this rank, the first one, gets if each rank's begin has this outcome; why it gave up; what it
    closed."""
    monkeypatch.setattr(defects, "rank_and_size", lambda: (0, len(outcomes)))
    others = any(outcome is not None for outcome in outcomes[1:])
    monkeypatch.setattr(defects, "is_so_on_any_rank", lambda has_failed: has_failed or others)
    reasons: list[str] = []
    closed: list[str] = []

    def make() -> Any:
        if outcomes[0] is not None:
            raise outcomes[0]
        return SimpleNamespace(work=SimpleNamespace(close=lambda: closed.append("work")))

    return begin_on_all_ranks("save a batch", make, reasons.append), reasons, closed


def test_a_pass_begins_on_all_ranks_or_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, reasons, closed = begin(None, None, monkeypatch=monkeypatch)
    assert begun is not None
    assert (reasons, closed) == ([], [])
    begun, reasons, closed = begin(None, SHORTAGE, monkeypatch=monkeypatch)
    assert (begun, closed) == (None, ["work"])
    assert reasons == ["other_rank: another tensor-parallel rank could not begin to save a batch"]
    begun, reasons, closed = begin(RuntimeError("a bug"), None, monkeypatch=monkeypatch)
    assert (begun, reasons, closed) == (None, ["defect: RuntimeError: a bug"], [])

"""What a pass raises ends that pass, and the log says so: in one line where the device has no memory."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("vllm")

from kintsugi.engine.worker import defects
from kintsugi.engine.worker.defects import contain_defects

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

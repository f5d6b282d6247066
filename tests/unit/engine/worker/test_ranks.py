"""A rank that fails inside a pass takes part in the rest of its collective operations with zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kintsugi.engine.worker import ranks
from kintsugi.engine.worker.ranks import LockStep, RankPart

WIDTH = 3


class Group:
    """The group of ranks, as vLLM's: notes what this rank takes part in."""

    def __init__(self) -> None:
        self.joined: list[tuple[str, tuple[int, ...], float]] = []
        self.full = False
        """Whether the device has no memory for the next result."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.full:
            self.full = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried.")
        self.joined.append(("all_reduce", tuple(tensor.shape), float(tensor.sum())))
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        self.joined.append((f"all_gather {dim}", tuple(tensor.shape), float(tensor.sum())))
        return tensor

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        raise AssertionError("no layer here scatters")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    monkeypatch.setattr(ranks, "get_tp_group", lambda: group)
    monkeypatch.setattr(ranks, "rank_and_size", lambda: (0, 2))
    return group


def call(group: Group, num_tokens: int, error: Exception | None = None) -> tuple[Tensor, ...]:
    """A layer call with two collective operations, between which it may fail."""
    group.all_reduce(torch.ones(num_tokens, WIDTH))
    if error is not None:
        raise error
    group.all_gather(torch.ones(2 * num_tokens, WIDTH), dim=0)
    return (torch.ones(num_tokens, 2, WIDTH, dtype=torch.float64),)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no"), "defect: ValueError: no"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried."), "device_memory: CUDA out of memory. Tried; "),
    ],
)
def test_a_call_that_fails_is_completed_with_zeros(group: Group, error: Exception, reason: str) -> None:
    step, part = LockStep(), RankPart()
    (full,) = step.run("layer 0", 4, lambda: call(group, 4), part)
    assert part.failure is None
    assert full.sum() == full.numel()
    group.joined.clear()
    (zeros,) = step.run("layer 0", 6, lambda: call(group, 6, error), part)
    assert group.joined == [("all_reduce", (6, WIDTH), 6.0 * WIDTH), ("all_gather 0", (12, WIDTH), 0.0)]
    assert part.failure is not None
    assert part.failure.startswith(reason)
    assert (zeros.shape, zeros.dtype, float(zeros.sum())) == ((6, 2, WIDTH), torch.float64, 0.0)


def test_an_operation_without_memory_for_its_result_is_made_up_for(group: Group) -> None:
    """It has not communicated yet, so the other ranks wait for it."""
    step, part = LockStep(), RankPart()
    step.run("layer 0", 4, lambda: call(group, 4), part)
    group.joined.clear()
    group.full = True
    step.run("layer 0", 4, lambda: call(group, 4), part)
    assert [(name, total) for name, _, total in group.joined] == [("all_reduce", 0.0), ("all_gather 0", 0.0)]


def test_a_rank_that_has_failed_computes_nothing_more_of_the_pass(group: Group) -> None:
    step, part = LockStep(), RankPart()
    step.run("layer 0", 4, lambda: call(group, 4), part)

    def fail() -> str:
        raise ValueError("between two calls")

    assert part.contain(fail, lambda: "nothing") == "nothing"
    group.joined.clear()
    (zeros,) = step.run("layer 0", 4, lambda: call(group, 4), part)
    assert [(name, total) for name, _, total in group.joined] == [("all_reduce", 0.0), ("all_gather 0", 0.0)]
    assert float(zeros.sum()) == 0.0
    assert part.failure == "defect: ValueError: between two calls"
    (full,) = step.run("layer 0", 4, lambda: call(group, 4), RankPart())
    assert full.sum() == full.numel(), "the next pass computes"


def test_one_rank_alone_raises(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "rank_and_size", lambda: (0, 1))
    with pytest.raises(ZeroDivisionError):
        RankPart().contain(lambda: 1 / 0, lambda: 0.0)


def test_a_call_that_has_never_succeeded_raises(group: Group) -> None:
    with pytest.raises(ValueError, match="no"):
        LockStep().run("layer 0", 4, lambda: call(group, 4, ValueError("no")), RankPart())
    assert group.__dict__.keys() == {"joined", "full"}, "the group's own operations are back"

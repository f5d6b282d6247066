"""The pretended device sees what makes a host wait, and what copies from memory that is not pinned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fakes import pretend_cuda
from tests.fakes.pretend_cuda import PretendCuda

WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "write by a mask": lambda x: x.__setitem__(x > 1, torch.zeros(2, device="cuda")),
    "write a number by an index": lambda x: x.__setitem__(torch.arange(2, device="cuda"), 1.0),
    "write a number by indices": lambda x: x.view(2, 2).__setitem__(
        (slice(None), torch.arange(1, device="cuda")), 1.0
    ),
    "write a number by a list": lambda x: x.__setitem__([0, 2], 1.0),
    "put a number of the host": lambda x: x.index_put_((torch.arange(2, device="cuda"),), torch.tensor(1.0)),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "copy to the host": lambda x: torch.zeros(4).copy_(x),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "a pinned copy that waits": lambda x: torch.zeros(4).pin_memory().to("cuda"),
}
COPYING: dict[str, Callable[[Tensor], object]] = {
    "to": lambda x: torch.zeros(4).to("cuda", non_blocking=True),
    "cuda": lambda x: torch.zeros(4).cuda(),
    "tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "index": lambda x: x[torch.tensor([0, 2])],
    "as_tensor": lambda x: torch.as_tensor([1.0], device="cuda"),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "index by a list": lambda x: x[[0, 2]],
    "write by an index": lambda x: x.__setitem__(torch.tensor([0, 2]), torch.ones(2, device="cuda")),
    "copy": lambda x: x.copy_(torch.zeros(4)),
}
FREE: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x + 1).square().sum(),
    "index": lambda x: x[torch.arange(2, device="cuda")],
    "write by an index": lambda x: x.__setitem__(
        torch.arange(2, device="cuda"), torch.ones(2, device="cuda")
    ),
    "fill by an index": lambda x: x.index_fill(0, torch.arange(2, device="cuda"), float("inf")),
    "write a number into a slice": lambda x: x.__setitem__(slice(1, 3), 2.0),
    "slice": lambda x: x[1:3].mul_(2),
    "sort": lambda x: x.sort(stable=True).values[:2],
    "pinned": lambda x: torch.zeros(4).pin_memory().to("cuda", non_blocking=True),
    "shape": lambda x: (x.shape, len(x), x.device, x.dtype),
}


@pytest.fixture(autouse=True)
def counted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretend_cuda, "SERVICES", __file__)


def counts(action: Callable[[Tensor], object], inference: bool = False) -> tuple[bool, bool]:
    with PretendCuda() as device, torch.inference_mode(inference):
        action(torch.arange(4.0, device="cuda"))
        return bool(device.syncs), bool(device.pageable)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_waiting_is_counted(name: str, inference: bool) -> None:
    waited, _ = counts(WAITING[name], inference)
    assert waited


@pytest.mark.parametrize("name", COPYING)
def test_copying_from_pageable_memory_is_counted(name: str) -> None:
    assert counts(COPYING[name]) == (False, True)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", FREE)
def test_nothing_else_is(name: str, inference: bool) -> None:
    assert counts(FREE[name], inference) == (False, False)


def test_tensors_of_two_devices_do_not_mix() -> None:
    with PretendCuda(), pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") + torch.ones(2)

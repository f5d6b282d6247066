"""At start, every variant of the GPU's kernel runs once; what does not run declines blending in one line.

There is no GPU here: `PretendCuda` has the reference in the kernel's place.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from kintsugi.core.errors import SelfTestFailed
from kintsugi.engine.worker import selftest
from kintsugi.engine.worker.attention import scattered
from kintsugi.engine.worker.model import LoadedModel
from kintsugi.fusor.kernels.scattered import variant_sizes
from tests.fakes.pretend_cuda import CUDA, PretendCuda, attend
from tests.unit.engine.worker.test_device import BLOCK, HEAD_DIM, HEADS, KV_HEADS, model_of, vllm_alone

__all__ = ["vllm_alone"]

KERNEL = "kintsugi.fusor.kernels.scattered.triton_attention"
LENGTH_MAX = 1020
"""Of the model. With blocks of 16 tokens, its kernel may see 1,024 positions."""


def model_on(device: torch.device, kernel_serves: bool = True) -> LoadedModel:
    model = model_of(2, device, kernel_serves)
    config: Any = model.vllm_config
    config.model_config = SimpleNamespace(uses_mrope=False, max_model_len=LENGTH_MAX)
    return model


class OwnThread(Executor):
    """Runs everything at once in the caller's thread, the only one that sees `PretendCuda`."""

    def submit(self, run: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(run(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattered, "ThreadPoolExecutor", lambda *_, **__: OwnThread())


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[LoadedModel]:
    """The models whose checks ran; those need an engine."""
    ran: list[LoadedModel] = []
    monkeypatch.setattr(selftest, "_run_checks", ran.append)
    return ran


def test_every_variant_of_a_kind_of_layer_runs_once(
    monkeypatch: pytest.MonkeyPatch, checks: list[LoadedModel]
) -> None:
    calls: list[tuple[int, int]] = []

    def note(
        query: Tensor, key: Tensor, value: Tensor, table: Tensor, positions: Tensor, **named: Any
    ) -> Tensor:
        assert int(positions.tolist()[-1]) < len(table) * key.shape[1]
        calls.append((len(query), len(table) * key.shape[1]))
        return attend(query, key, value, table, positions, **named)

    with PretendCuda():
        monkeypatch.setattr(KERNEL, note)
        model = model_on(CUDA)
        selftest.self_test(model)
    assert checks == [model]
    sizes = variant_sizes(HEADS // KV_HEADS, HEAD_DIM * 4, 1024)
    assert {context for _, context in sizes if context > 128} == {512, 1024}
    in_blocks = [(count, -(-context // BLOCK) * BLOCK) for count, context in sizes]
    assert calls == in_blocks


def test_a_variant_that_does_not_fit_declines_blending(
    monkeypatch: pytest.MonkeyPatch, checks: list[LoadedModel]
) -> None:
    def launch(query: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if len(query) > 16:
            raise RuntimeError("out of resource: shared memory,\nRequired: 200000")
        return attend(query, *arguments, **named)

    with PretendCuda():
        monkeypatch.setattr(KERNEL, launch)
        model = model_on(CUDA)
        impl = model.layers[0].attention.impl
        with pytest.raises(SelfTestFailed) as raised:
            selftest.self_test(model)
        assert model.layers[0].attention.impl is impl
    assert str(raised.value) == (
        "the kernel for scattered tokens does not run on this GPU (32 queries of 4 heads of 16 over 32 "
        "positions): RuntimeError: out of resource: shared memory, Required: 200000; update Triton, or "
        "report this"
    )
    assert checks == []


def test_a_device_without_memory_declines_blending(
    monkeypatch: pytest.MonkeyPatch, checks: list[LoadedModel]
) -> None:
    def launch(*_arguments: Any, **_named: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.15 GiB.")

    with PretendCuda():
        monkeypatch.setattr(KERNEL, launch)
        with pytest.raises(
            SelfTestFailed, match=r"^device_memory: CUDA .* 2.00 GiB; lower gpu_memory_utiliz"
        ):
            selftest.self_test(model_on(CUDA))
    assert checks == []


def test_where_the_kernel_does_not_serve_none_runs(
    monkeypatch: pytest.MonkeyPatch, checks: list[LoadedModel]
) -> None:
    def launch(*_arguments: Any, **_named: Any) -> Tensor:
        raise AssertionError("it serves no layer")

    with PretendCuda():
        monkeypatch.setattr(KERNEL, launch)
        selftest.self_test(model_on(CUDA, kernel_serves=False))
        selftest.self_test(model_on(torch.device("cpu")))
    assert len(checks) == 2

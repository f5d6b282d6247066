"""The worker's side on a GPU: no step waits for the device, and no pass is reported before its weights are
checked. There is no GPU here: `PretendCuda` counts the waits and says when the device has caught up."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.layout import Codec
from kintsugi.core.plan import BlendPlan, Selection
from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.protocol import BlendJob, JobTokens, SaveJob, StepMetadata
from kintsugi.engine.worker import side as side_module
from kintsugi.engine.worker import stack as stack_module
from kintsugi.engine.worker.side import WorkerSide
from kintsugi.engine.worker.weights import LoadedWeights
from tests.fakes.pretend_cuda import CPU, CUDA, OPERATION_S, PretendCuda
from tests.unit.engine.worker.test_device import (
    BLOCK,
    LENGTH,
    PREFIX,
    SPACE,
    VOCAB,
    Scene,
    model_of,
    scene_of,
    vllm_alone,
)

__all__ = ["vllm_alone"]

LAYERS = 3
STEPS_MAX = 2000
BLOCKS = (list(range(1, -(-LENGTH // BLOCK) + 2)),)
ANY: Any = None


class Bench:
    """A worker's side over a small model, and the engine that steps it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: torch.device, slice_tokens: int) -> None:
        monkeypatch.setattr(side_module, "pass_bytes", lambda *_job: 0)
        monkeypatch.setattr(side_module, "reserve_memory", lambda *_: math.inf)
        self.scene: Scene = scene_of(LAYERS, Codec.RAW)
        model = model_of(LAYERS, device, kernel_serves=True)
        whole: Any = model.root.embedding
        self.weight: torch.Tensor = getattr(whole, "on_host", whole)
        root: Any = model.root
        root.load_weights = lambda *_weights: set()
        embedding = root.__dict__.pop("embedding")
        root._parameters["embedding"] = embedding
        self.side = WorkerSide(
            VllmConfig(), ANY, EngineConfig(self_test=False), self.scene.store, slice_tokens
        )
        self.side._model = model
        self.side._codec = Codec.RAW
        self.side._weights = LoadedWeights(root, device)

    def blend(self, request_id: str = "asked", yields: bool = False) -> StepMetadata:
        tokens = JobTokens(request_id, self.scene.token_ids.tolist(), 0, BLOCKS)
        plan = BlendPlan(self.scene.hits, Selection(0.3))
        job = BlendJob(
            tokens, plan, self.scene.manifests, False, timeline=True, next_token_id=7, yields=yields
        )
        return StepMetadata(blends=[job])

    def save(self, discovered: bool = False) -> StepMetadata:
        token_ids = [token % VOCAB for token in range(30)]
        key = ChunkKey.of(SPACE, token_ids[PREFIX:])
        job = SaveJob(JobTokens("asked", token_ids, 0, ([1, 2],)), SPACE, key, (), PREFIX, 30)
        return StepMetadata(discovered=[job]) if discovered else StepMetadata(saves=[job])

    def step(self, metadata: StepMetadata | None = None) -> None:
        self.side.step(metadata or StepMetadata(idle_tokens=self.side._slice_tokens))

    def step_until_launched(self) -> None:
        """The host has nothing left to launch, whatever the device has done."""
        for _ in range(STEPS_MAX):
            self.step()
            saves = [
                self.side._save and self.side._save.work,
                self.side._idle_saves._batch and self.side._idle_saves._batch.work,
            ]
            passes = [blend.work for blend in self.side._blends.values()] + [one for one in saves if one]
            if all(work.is_launched for work in passes):
                return
        raise AssertionError("the passes do not come to their end")

    def finish(self) -> dict[str, Accounting]:
        """Step until every request is done."""
        for _ in range(STEPS_MAX):
            wait(self.side._puts.values())
            self.step()
            if not self.side._has_work:
                report = self.side.take_report()
                assert report is not None
                return report.finished
        raise AssertionError("the requests do not end")

    def time_looks(self, device: PretendCuda) -> list[float]:
        """Fills itself with what the looks at the weights take of the device."""
        weights = self.side._weights
        assert weights is not None
        look, times = weights._look, []

        def timed() -> Any:
            began_s = device.device_s
            found = look()
            times.append(device.device_s - began_s)
            return found

        weights._look = timed  # type: ignore[method-assign]
        return times

    def catch_up_behind_check(self, device: PretendCuda) -> None:
        """Have the device catch up between the next step's check of the weights and its passes."""
        weights = self.side._weights
        assert weights is not None
        check = weights.check

        def check_and_catch_up() -> str | None:
            change = check()
            device.is_behind = False
            return change

        weights.check = check_and_catch_up  # type: ignore[method-assign]

    def change_weights(self) -> None:
        """As vLLM's loaders write."""
        self.weight.data.add_(1.0)


@pytest.fixture
def device() -> Iterator[PretendCuda]:
    with PretendCuda() as device:
        yield device


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, device: PretendCuda) -> Iterator[Bench]:
    bench = Bench(monkeypatch, CUDA, slice_tokens=20)
    device.clear()
    yield bench
    bench.side.close()


def test_a_blend_waits_for_nothing_and_is_timed_by_the_device(bench: Bench, device: PretendCuda) -> None:
    looked_s = bench.time_looks(device)
    began_s = device.device_s
    device.is_behind = True
    bench.step(bench.blend())
    bench.step_until_launched()
    for _ in range(3):
        bench.step()
    assert not bench.side.take_finished().finished_recving
    computed_s = device.device_s - began_s - sum(looked_s)
    device.is_behind = False
    bench.step()
    accounting, sample = bench.side._finished["asked"], bench.side._passes["asked"]
    assert (accounting.outcome, device.syncs, device.pageable) == (Outcome.BLENDED, {}, {})
    # All but what the tables of blocks took, before the first slice.
    assert 0.95 * computed_s <= sample.busy_s <= computed_s
    assert accounting.compute_ms == pytest.approx(sample.busy_s * 1e3, abs=1e-3)
    layers = accounting.timeline or []
    assert len(layers) == LAYERS
    for before, layer in zip([None, *layers], layers, strict=False):
        assert before is None or before.compute_end_ms <= layer.compute_start_ms
        assert layer.compute_end_ms - layer.compute_start_ms >= 20 * OPERATION_S * 1e3


def test_a_save_waits_for_nothing(bench: Bench, device: PretendCuda) -> None:
    metadata = bench.save()
    key = metadata.saves[0].key
    device.is_behind = True
    bench.step(metadata)
    bench.step_until_launched()
    bench.step()
    assert not bench.side._puts
    device.is_behind = False
    assert bench.finish()["asked"].outcome is Outcome.SAVED
    assert (device.syncs, device.pageable) == ({}, {})
    assert bench.scene.store.lookup("device", [key]) != [None]


def test_a_save_states_what_it_computed_and_not_what_the_engine_did_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, CPU, slice_tokens=20)
    bench.step(bench.save())
    assert bench.side._save, "the save needs more steps"
    time.sleep(1.0)
    saved = bench.finish()["asked"]
    assert saved.outcome is Outcome.SAVED
    assert 0 < saved.compute_ms < 1e3
    bench.side.close()


def test_a_save_states_what_the_device_computed(bench: Bench) -> None:
    bench.step(bench.save())
    bench.step_until_launched()
    saved = bench.finish()["asked"]
    assert saved.compute_ms >= LAYERS * 20 * OPERATION_S * 1e3


def test_discovered_chunks_are_timed_by_the_device(bench: Bench, device: PretendCuda) -> None:
    bench.step(bench.save(discovered=True))
    bench.step_until_launched()
    bench.step()
    wait(bench.side._idle_saves._puts)
    (accounting,) = bench.side._idle_saves.take_outcomes()
    assert accounting.outcome is Outcome.SAVED
    assert accounting.compute_ms >= LAYERS * 20 * OPERATION_S * 1e3
    assert (device.syncs, device.pageable) == ({}, {})


@pytest.mark.parametrize("catches_up", ["before the check of a step", "behind the check of a step"])
@pytest.mark.parametrize("work", ["blend", "save", "discovered"])
def test_nothing_is_reported_or_stored_that_other_weights_computed(
    bench: Bench, device: PretendCuda, work: str, catches_up: str
) -> None:
    """They change behind the first slice, while the device has got nowhere yet."""
    metadata = bench.blend() if work == "blend" else bench.save(discovered=work == "discovered")
    stored = dict(bench.scene.store._chunks)
    device.is_behind = True
    bench.step(metadata)
    bench.change_weights()
    bench.step_until_launched()
    if catches_up.startswith("before"):
        device.is_behind = False
    else:
        bench.catch_up_behind_check(device)
    found = list(bench.finish().values()) if work != "discovered" else []
    bench.step()
    found += bench.side._idle_saves.take_outcomes()
    assert [one.outcome for one in found] == [Outcome.FAILED]
    assert (found[0].reason or "").startswith("weights_changed: values of parameters differ")
    assert bench.scene.store._chunks == stored
    assert not device.syncs


def test_a_pass_that_is_done_does_not_wait_for_the_budget_of_another(
    bench: Bench, device: PretendCuda
) -> None:
    device.is_behind = True
    bench.step(bench.blend("slow"))
    bench.side._blends["slow"].work.advance(float("inf"))
    bench.step(bench.blend("quick"))
    bench.step_until_launched()
    bench.side._blends["slow"].work.is_launched = False  # it has slices left, and takes the whole budget
    bench.side._blends["slow"].work.next_unit = lambda: 1e9  # type: ignore[method-assign]
    device.is_behind = False
    bench.step()
    assert set(bench.side._finished) == {"quick"}


def test_a_pass_is_over_once_it_is_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, device: PretendCuda
) -> None:
    """Ranks that end a pass in different steps would no longer run the same layers together."""
    is_done = bench.side._stack([JobTokens("asked", [0] * LENGTH, 0, BLOCKS)]).end_pass()
    assert is_done()
    monkeypatch.setattr(stack_module, "is_so_on_any_rank", lambda _is_behind: True)
    assert not is_done()


def test_on_a_cpu_every_step_checks_the_weights_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, CPU, slice_tokens=20)
    bench.step(bench.blend())
    assert bench.side._blends
    bench.change_weights()
    bench.step()
    assert (bench.side._finished["asked"].reason or "").startswith("weights_changed: ")
    bench.side.close()


@pytest.mark.parametrize("fails_in", [None, "find_layers", "LoadedWeights"])
def test_blending_is_off_on_every_rank_if_one_cannot(
    monkeypatch: pytest.MonkeyPatch, fails_in: str | None
) -> None:
    """Here on this rank, or with None on another, which says so once both have learnt their model."""
    model = SimpleNamespace(device=CPU, root=None, layout=SimpleNamespace(holds=lambda _codec: True))
    flags: list[bool] = []

    def agree(flag: bool) -> bool:
        flags.append(flag)
        return flag or (fails_in is None and len(flags) == 2)

    def fail(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("by the test")

    replaced = {"find_unsupported": None, "find_layers": None, "learn_model": model}
    for name, value in replaced.items():
        monkeypatch.setattr(side_module, name, lambda *_arguments, value=value: value)
    monkeypatch.setattr(side_module, "LoadedWeights", lambda *_arguments: None)
    monkeypatch.setattr(side_module, "is_so_on_any_rank", agree)
    if fails_in is not None:
        monkeypatch.setattr(side_module, fails_in, fail)
    side = WorkerSide(VllmConfig(), ANY, EngineConfig(self_test=False), ANY, 20)
    side.register({})
    report = side.take_report()
    assert report is not None
    assert (report.unable or "").startswith("other_rank: " if fails_in is None else "self_test_failed: ")
    # Every rank has to ask as often as the others.
    expected = {
        None: [False, False],
        "find_layers": [True],
        "LoadedWeights": [False, True],
    }
    assert flags == expected[fails_in]
    side.close()


def test_a_layer_has_one_deadline(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of several blocks its engine's step for a layer: for `layer_deadline_ms`, not longer."""
    given_s: list[float] = []
    stream = type(bench.scene.store).stream

    def noting(*arguments: Any) -> Any:
        given_s.append(arguments[-1])
        return stream(*arguments)

    monkeypatch.setattr(type(bench.scene.store), "stream", noting)
    bench.step(bench.blend())
    (blend,) = bench.side._blends.values()
    assert blend.work._loader is not None
    assert blend.work._loader.patience_s == EngineConfig().layer_deadline_ms / 1e3
    assert given_s
    assert max(given_s) < blend.work._loader.patience_s, "the store says first which chunk is late"
    bench.finish()


def test_what_is_in_flight_when_vllm_empties_its_cache_has_no_kv(bench: Bench) -> None:
    bench.step(bench.blend())
    assert bench.side._blends
    bench.step(StepMetadata(cache_is_reset=True))
    results = bench.side.take_finished()
    assert results.finished_recving == results.failed_recving == {"asked"}
    report = bench.side.take_report()
    assert report is not None
    assert str(report.finished["asked"].reason).startswith("cache_reset: ")
    bench.step()
    assert not bench.side._has_work


def test_a_chunk_that_is_put_when_vllm_empties_its_cache_is_stored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But its request's blocks are empty: vLLM computes it."""
    stored = threading.Event()
    put = WorkerSide._put

    def late(*arguments: Any) -> Accounting:
        assert stored.wait(60.0)
        return put(*arguments)

    monkeypatch.setattr(WorkerSide, "_put", late)
    bench.step(bench.save())
    while not bench.side._puts:
        bench.step()
    bench.step(StepMetadata(cache_is_reset=True))
    stored.set()
    while not (results := bench.side.take_finished()).finished_recving:
        bench.step()
    assert results.finished_recving == results.failed_recving
    report = bench.side.take_report()
    assert report is not None
    assert {one.outcome for one in report.finished.values()} == {Outcome.SAVED}


def test_a_blend_without_a_client_pauses_while_others_are_prefilled_or_blended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, CPU, slice_tokens=20)
    trial = bench.blend("trial", yields=True)
    trial.prefills = True
    bench.step(trial)
    for _ in range(3):
        bench.step(StepMetadata(prefills=True))
    assert bench.side._blends["trial"].advanced_s == 0
    bench.step()
    started_s = bench.side._blends["trial"].advanced_s
    assert started_s > 0
    bench.step(bench.blend("client"))
    while "client" in bench.side._blends:
        assert bench.side._blends["trial"].advanced_s == started_s
        bench.step()
    finished = bench.finish()
    assert [one.outcome for one in finished.values()] == [Outcome.BLENDED, Outcome.BLENDED]
    bench.side.close()

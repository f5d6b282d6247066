"""Saves that no request waits for: computed in slices, put on a thread, reported together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.errors import Unavailable
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.engine.protocol import JobTokens, SaveJob
from kintsugi.engine.worker import defects
from kintsugi.engine.worker import saves as saves_module
from kintsugi.engine.worker.saves import IdleSavePasses
from kintsugi.fusor.sliced import PassStatus, SlicedWork, Stopwatch

SPACE = ChunkSpace(ModelFingerprint.of({"model": "toy"}), "acme")


class Pass(SlicedWork):
    """Takes three units of one token-layer each."""

    failure = None

    def __init__(self, jobs: list[SaveJob]) -> None:
        self.status = PassStatus.RUNNING
        self.watch = Stopwatch(torch.device("cpu"))
        self.frames = [[memoryview(bytes([index]))] for index, _ in enumerate(jobs)]
        self.units = 0
        self.is_closed = False

    def next_unit(self) -> float:
        self.units += 1
        if self.units == 3:
            self.status = PassStatus.DONE
        return 1.0

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (saves_module, defects):
        monkeypatch.setattr(module, "is_so_on_any_rank", lambda flag: flag)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def job(number: int) -> SaveJob:
    tokens = JobTokens(f"discovered-{number}", [number], 0, ([1],))
    return SaveJob(tokens, SPACE, ChunkKey.of(SPACE, [number]), (), 0, 1, ttl_s=60.0)


def saves_of(
    threads: ThreadPoolExecutor, refused: int = -1, is_first_rank: bool = True, is_unsound: bool = False
) -> tuple[IdleSavePasses, list[Pass], list[Any]]:
    passes: list[Pass] = []
    stored: list[Any] = []

    def make_pass(jobs: list[SaveJob], unit_tokens_max: int) -> Any:
        passes.append(Pass(jobs))
        return passes[-1]

    def put(one: SaveJob, frames: list[memoryview], accounting: Accounting) -> Accounting:
        if one.tokens.token_ids == [refused]:
            raise Unavailable("the store is down")
        stored.append((one, bytes(frames[0])))
        return accounting

    def check() -> bool:
        if is_unsound:
            saves.abandon("weights_changed")
        return is_unsound

    saves = IdleSavePasses(make_pass, put, threads, lambda: is_first_rank, check)
    return saves, passes, stored


def test_a_batch_is_computed_in_slices_and_reported_once_it_is_stored(threads: ThreadPoolExecutor) -> None:
    saves, passes, stored = saves_of(threads)
    jobs = [job(1), job(2)]
    saves.begin(jobs)
    saves.advance(2.0)
    assert (saves.is_computing, passes[0].units, saves.take_outcomes()) == (True, 2, [])
    saves.advance(2.0)
    assert not saves.is_computing
    threads.shutdown(wait=True)
    assert stored == [(jobs[0], b"\0"), (jobs[1], b"\1")]
    assert [one.outcome for one in saves.take_outcomes()] == [Outcome.SAVED, Outcome.SAVED]
    assert saves.take_outcomes() == []


def test_a_rank_that_does_not_put_reports_nothing(threads: ThreadPoolExecutor) -> None:
    saves, _, stored = saves_of(threads, is_first_rank=False)
    saves.begin([job(1)])
    saves.advance(9.0)
    assert not saves.is_computing
    threads.shutdown(wait=True)
    assert (stored, saves.take_outcomes()) == ([], [])


def test_a_refused_chunk_is_reported_with_its_reason(threads: ThreadPoolExecutor) -> None:
    saves, _, _ = saves_of(threads, refused=2)
    saves.begin([job(1), job(2)])
    saves.advance(9.0)
    threads.shutdown(wait=True)
    first, second = saves.take_outcomes()
    assert first.outcome is Outcome.SAVED
    assert (second.outcome, second.reason) == (Outcome.FAILED, "Unavailable: the store is down")


def test_what_is_abandoned_is_reported_and_closed(threads: ThreadPoolExecutor) -> None:
    saves, passes, stored = saves_of(threads)
    saves.begin([job(1), job(2)])
    saves.advance(1.0)
    saves.abandon("weights_changed")
    assert [one.reason for one in saves.take_outcomes()] == ["weights_changed"] * 2
    assert passes[0].is_closed
    assert not saves.is_computing
    saves.abandon("again")
    assert saves.take_outcomes() == []
    assert stored == []


def test_of_an_unsound_batch_nothing_is_stored(threads: ThreadPoolExecutor) -> None:
    saves, _, stored = saves_of(threads, is_unsound=True)
    saves.begin([job(1), job(2)])
    saves.advance(9.0)
    assert not saves.is_computing
    threads.shutdown(wait=True)
    assert [one.reason for one in saves.take_outcomes()] == ["weights_changed"] * 2
    assert stored == []

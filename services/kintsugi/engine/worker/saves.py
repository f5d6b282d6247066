"""The saves that a worker computes: which chunks together, and those for which no request waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.engine.protocol import SaveJob
from kintsugi.fusor.save import SaveItem, SavePass
from kintsugi.fusor.sliced import PassStatus

Put = Callable[[SaveJob, list[memoryview], Accounting], Accounting]


@dataclass
class SaveBatch:
    """Saves that requests wait for, in hand."""

    jobs: list[SaveJob]
    work: SavePass
    cancelled: set[str]
    advanced_s: float = 0.0
    """Time in slices. What the engine computes between them is not what a save costs."""

    @property
    def computed_s(self) -> float:
        device_s = self.work.watch.seconds()
        return self.advanced_s if device_s is None else device_s


def num_saves_together(waiting: Sequence[SaveJob], unit_tokens_max: int) -> int:
    """How many of the waiting chunks make the next batch, at least one; saves and audits go apart.

    As many as fit in one unit of every layer.
    """
    tokens = 0
    for index, job in enumerate(waiting):
        tokens += len(job.tokens.token_ids)
        if index and (tokens > unit_tokens_max or job.is_audit != waiting[0].is_audit):
            return index
    return len(waiting)


def save_items(jobs: Sequence[SaveJob]) -> list[SaveItem]:
    """The chunks behind the prefix, or behind prefix and context."""
    return [
        SaveItem(
            torch.tensor(job.tokens.token_ids, dtype=torch.int64),
            job.tokens.start,
            job.chunk_start,
            job.chunk_end,
        )
        for job in jobs
    ]


class IdleSavePasses:
    """Runs the saves that no request waits for, in steps with nothing else to do, one batch at a time. Called
    from the worker's thread. On every rank, with the same jobs; only the first rank puts and
    reports."""

    def __init__(
        self,
        make_pass: Callable[[list[SaveJob], int], SavePass],
        put: Put,
        threads: ThreadPoolExecutor,
        is_first_rank: Callable[[], bool],
        is_unsound: Callable[[], bool],
    ) -> None:
        """``make_pass`` gets the jobs, and the most tokens that a layer may compute without a pause. ``put``
        stores a chunk, on one of the ``threads``. ``is_unsound`` is asked once a batch is
        computed, and abandons one that is."""
        self._make_pass = make_pass
        self._put = put
        self._threads = threads
        self._is_first_rank = is_first_rank
        self._is_unsound = is_unsound
        self._jobs: list[SaveJob] = []
        self._work: SavePass | None = None
        self._computed_s = 0.0
        self._puts: list[Future[Accounting]] = []
        self._outcomes: list[Accounting] = []

    @property
    def is_computing(self) -> bool:
        return bool(self._jobs)

    def begin(self, jobs: list[SaveJob]) -> None:
        """Take a batch. The outcomes of the one before have been taken."""
        assert not self._jobs
        self._jobs, self._work, self._computed_s = jobs, None, 0.0

    def advance(self, budget: float) -> None:
        """Compute for ``budget`` token-layers."""
        began_s = time.perf_counter()
        if self._work is None:
            self._work = self._make_pass(self._jobs, int(budget))
        self._work.advance(budget)
        self._computed_s += time.perf_counter() - began_s
        if self._work.status is PassStatus.DONE and not self._is_unsound():
            work, jobs = self._work, self._jobs
            self._work, self._jobs = None, []
            if self._is_first_rank():
                device_s = work.watch.seconds()
                computed_s = self._computed_s if device_s is None else device_s
                compute_ms = round(computed_s * 1e3 / len(jobs), 3)
                saved = Accounting(Outcome.SAVED, compute_ms=compute_ms)
                self._puts = [
                    self._threads.submit(self._put, job, frames, saved)
                    for job, frames in zip(jobs, work.frames, strict=True)
                ]

    def abandon(self, reason: str | None) -> None:
        """Drop what is being computed."""
        self.close()
        dropped, self._jobs, self._work = self._jobs, [], None
        if self._is_first_rank():
            self._outcomes += [Accounting(Outcome.FAILED, reason=reason) for _ in dropped]

    def take_outcomes(self) -> list[Accounting]:
        """What has become of a batch's chunks, once all of them are stored, refused or dropped. Raises
        nothing."""
        if self._puts and all(put.done() for put in self._puts):
            done, self._puts = self._puts, []
            self._outcomes += [_outcome(put) for put in done]
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        if self._work is not None:
            self._work.close()


def _outcome(put: Future[Accounting]) -> Accounting:
    error = put.exception()
    if error is None:
        return put.result()
    return Accounting(Outcome.FAILED, reason=f"{type(error).__name__}: {error}")

"""Batches of chunks that the worker saves: for waiting requests, or in idle steps for discovered segments."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from vllm.logger import init_logger

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.errors import KintsugiError
from kintsugi.engine.protocol import SaveJob
from kintsugi.engine.worker.defects import begin_on_all_ranks
from kintsugi.engine.worker.ranks import is_so_on_any_rank
from kintsugi.fusor.save import SavePass
from kintsugi.fusor.sliced import PassStatus

logger = init_logger(__name__)


@dataclass
class SaveBatch:
    """Chunks that one pass computes together."""

    jobs: list[SaveJob]
    work: SavePass
    cancelled: set[str] = field(default_factory=set)
    """Ids of requests that ended while their chunks were computed."""
    advanced_s: float = 0.0
    """Time spent in slices. What the engine computes between slices is not part of a save's cost."""

    def advance(self, budget: float) -> float:
        """Run a slice of ``budget`` token-layers. Returns the number that was computed."""
        began_s = time.perf_counter()
        spent = self.work.advance(budget)
        self.advanced_s += time.perf_counter() - began_s
        return spent

    def find_failure(self) -> str | None:
        """Return why the computed chunks are wrong; None if they are not. All ranks must call it together."""
        failure = self.work.failure
        if not is_so_on_any_rank(failure is not None):
            return None
        return failure or "other_rank: another tensor-parallel rank could not compute the chunk"

    @property
    def computed_s(self) -> float:
        device_s = self.work.watch.seconds()
        return self.advanced_s if device_s is None else device_s


def num_saves_together(waiting: Sequence[SaveJob], unit_tokens_max: int) -> int:
    """Return how many of the waiting chunks make the next batch: at least one, and as many as fit in one unit
    of each layer. A batch holds either saves or audits."""
    tokens = 0
    for index, job in enumerate(waiting):
        tokens += len(job.tokens.token_ids)
        if index and (tokens > unit_tokens_max or job.is_audit != waiting[0].is_audit):
            return index
    return len(waiting)


def outcome_of(put: Future[Accounting]) -> Accounting:
    """Return the accounting of a finished put or audit; if it raised, the outcome is `failed`. Logs a
    defect."""
    error = put.exception()
    if error is None:
        return put.result()
    if not isinstance(error, KintsugiError):
        logger.error("A chunk was not stored or audited because of a defect", exc_info=error)
    return Accounting(Outcome.FAILED, reason=f"{type(error).__name__}: {error}")


class IdleSavePasses:
    """Saves discovered segments in steps that compute nothing else, one batch at a time.

    Runs on the worker's thread, on every rank with the same jobs. Only the first rank puts and reports.
    """

    def __init__(
        self,
        make_pass: Callable[[list[SaveJob], int], SavePass],
        put: Callable[[SaveJob, list[memoryview], Accounting], Accounting],
        threads: ThreadPoolExecutor,
        is_first_rank: Callable[[], bool],
        is_unsound: Callable[[], bool],
    ) -> None:
        """``make_pass`` takes the jobs, and the maximum number of tokens that a layer computes without a
        pause. ``put`` stores a chunk, on one of the ``threads``. ``is_unsound`` is called after a batch is
        computed; if it returns True, it has abandoned the batch."""
        self._make_pass = make_pass
        self._put = put
        self._threads = threads
        self._is_first_rank = is_first_rank
        self._is_unsound = is_unsound
        self._jobs: list[SaveJob] = []
        self._batch: SaveBatch | None = None
        self._puts: list[Future[Accounting]] = []
        self._outcomes: list[Accounting] = []

    @property
    def is_computing(self) -> bool:
        return bool(self._jobs)

    def begin(self, jobs: list[SaveJob]) -> None:
        """Take a batch, after the outcomes of the previous one have been taken."""
        assert not self._jobs
        self._jobs = jobs

    def advance(self, budget: float) -> None:
        """Compute ``budget`` token-layers, and put the chunks if the batch is done."""
        batch = self._batch
        if batch is None:
            batch = self._batch = begin_on_all_ranks(
                "save a batch of discovered segments",
                lambda: SaveBatch(self._jobs, self._make_pass(self._jobs, int(budget))),
                self.abandon,
            )
        if batch is None:
            return
        batch.advance(budget)
        if batch.work.status is PassStatus.DONE and not self._is_unsound():
            if failure := batch.find_failure():
                self.abandon(failure)
                return
            self._jobs, self._batch = [], None
            if self._is_first_rank():
                compute_ms = round(batch.computed_s * 1e3 / len(batch.jobs), 3)
                saved = Accounting(Outcome.SAVED, compute_ms=compute_ms)
                self._puts = [
                    self._threads.submit(self._put, job, frames, saved)
                    for job, frames in zip(batch.jobs, batch.work.frames, strict=True)
                ]

    def abandon(self, reason: str | None) -> None:
        """Drop the batch that is being computed, if any."""
        self.close()
        dropped, self._jobs, self._batch = self._jobs, [], None
        if self._is_first_rank():
            self._outcomes += [Accounting(Outcome.FAILED, reason=reason) for _ in dropped]

    def take_outcomes(self) -> list[Accounting]:
        """Return the outcomes of a batch's chunks, after all of them are stored, refused or dropped."""
        if self._puts and all(put.done() for put in self._puts):
            self._outcomes += [outcome_of(put) for put in self._puts]
            self._puts = []
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        if self._batch is not None:
            self._batch.work.close()

"""Pool of worker actors on Ray: sends batches, returns outcomes, replaces dead workers."""

from __future__ import annotations

import os
from typing import Any

from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi.precompute.batches import ChunkBatch
from kintsugi.precompute.local_ray import join_ray, start_local_ray
from kintsugi.precompute.spec import JobSpec
from kintsugi.precompute.worker import PrefillerFactory, Worker, WorkerSpec

BATCHES_PER_WORKER = 2
"""One batch runs and one waits, so that no worker idles for a round trip."""
OBJECT_STORE_BYTES = 256 << 20
"""Size of the object store of a Ray that is started here: room for some blocks of token ids. Its used pages
count as the driver's memory."""

Outcome = list[str] | KintsugiError | None
"""The outcome of each chunk, the error of the whole batch, or None if the worker died."""


def ensure_ray(workers: int) -> None:
    """Use the running Ray, or join the one at `$RAY_ADDRESS`, or start one here that listens on loopback
    only.

    A Ray that is started here is told of more CPUs than the machine has: each worker reserves one
    permanently, and reading needs some as well. Raises `Unavailable` if Ray cannot be joined or started.
    """
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            join_ray(address)
        else:
            start_local_ray(
                num_cpus=(os.cpu_count() or 1) + workers,
                object_store_memory=OBJECT_STORE_BYTES,
            )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RaySystemError) as error:
        what = (
            f"no Ray answers at RAY_ADDRESS={address}; check that it runs, or unset it to start one here"
            if address
            else "Ray does not start here; free some memory, or set RAY_ADDRESS to join a running one"
        )
        raise Unavailable(f"{what} ({error})") from error


class Pool:
    """Engine workers, started on demand. Not thread-safe."""

    def __init__(self, job: JobSpec, spec: WorkerSpec, factory: PrefillerFactory) -> None:
        self._job = job
        self._spec = spec
        self._factory = factory
        self._workers: list[Any] = []
        self._running: dict[Any, tuple[Any, ChunkBatch]] = {}
        self.engine_start_s = 0.0
        """Longest engine start among the workers that have answered."""

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def has_room(self) -> bool:
        return self.in_flight < self._job.workers * BATCHES_PER_WORKER

    def submit(self, batch: ChunkBatch) -> None:
        """Send a batch to the worker with the fewest batches; start another worker if all are busy."""
        load = dict.fromkeys(self._workers, 0)
        for worker, _ in self._running.values():
            load[worker] = load.get(worker, 0) + 1
        idle = [worker for worker, count in load.items() if count == 0]
        if not idle and len(self._workers) < self._job.workers:
            self._workers.append(self._start_worker())
            idle = self._workers[-1:]
        worker = idle[0] if idle else min(self._workers, key=load.__getitem__)
        reference = worker.fill.remote(batch.chunks)
        self._running[reference] = (worker, batch)

    def _start_worker(self) -> Any:
        import ray

        job = self._job
        actor = ray.remote(Worker).options(
            num_cpus=1, num_gpus=job.gpus_per_worker, max_restarts=0, max_task_retries=0
        )
        return actor.remote(self._spec, self._factory)

    def wait(self, timeout_s: float) -> list[tuple[ChunkBatch, Outcome]]:
        """Wait up to `timeout_s` for a finished batch, and return the finished ones. The outcome of a dead
        worker's batches is None."""
        import ray

        if not self._running:
            return []
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        return [self._take_result(reference) for reference in done]

    def _take_result(self, reference: Any) -> tuple[ChunkBatch, Outcome]:
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        worker, batch = self._running.pop(reference)
        try:
            outcomes: list[str]
            outcomes, start_s = ray.get(reference)
            self.engine_start_s = max(self.engine_start_s, start_s)
            return batch, outcomes
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, KintsugiError):
                return batch, cause
            return batch, Unavailable(f"a worker failed: {type(cause).__name__}: {cause}")
        except RayActorError:
            if worker in self._workers:
                self._workers.remove(worker)
            return batch, None
        except RayError as error:
            return batch, Unavailable(f"a worker's answer was lost: {error}")

    def close(self) -> None:
        """Kill the workers; their running batches are lost. Idempotent."""
        import ray

        for worker in self._workers:
            ray.kill(worker)
        self._workers.clear()
        self._running.clear()

"""Finds the processes of a job's workers."""

from __future__ import annotations

import os

import ray

from kintsugi.precompute.pool import Pool


def worker_process_ids(pool: Pool) -> list[int]:
    """The process ids of the pool's running workers."""
    calls = [worker.__ray_call__.remote(lambda _: os.getpid()) for worker in pool._workers]
    ids: list[int] = ray.get(calls)
    return ids

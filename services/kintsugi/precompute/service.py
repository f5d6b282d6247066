"""The gRPC service `Precompute`, which can be mounted on any `grpc.aio` server.

    add_PrecomputeServicer_to_server(PrecomputeServicer(JobManager(state)), server)

A server that mounts it must control access; `serve` serves it alone, on loopback.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION_SERVICE
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from kintsugi.core.errors import InvalidField, KintsugiError, Unavailable
from kintsugi.core.schema import load
from kintsugi.precompute.manager import JobEntry, JobManager
from kintsugi.precompute.progress import Progress
from kintsugi.precompute.spec import JobSpec
from kintsugi.rpc.v1 import precompute_pb2 as pb
from kintsugi.rpc.v1 import precompute_pb2_grpc
from kintsugi.store.protocol.server_options import SERVER_OPTIONS
from kintsugi.store.protocol.status import abort_call
from kintsugi.store.protocol.tls import check_listen

SERVICE = "kintsugi.rpc.v1.Precompute"
SPEC_BYTES_MAX = 1 << 20
WATCH_PERIOD_S = 0.5
"""Minimum time between two messages of `Watch`; changes in between are sent as one."""

Answer = TypeVar("Answer")

_COPIED = (
    *("corpus", "error", "documents", "documents_unchanged", "documents_failed", "documents_vanished"),
    *("chunks", "chunks_resident", "chunks_missing", "chunks_filled", "chunks_failed", "chunks_invalidated"),
    *("tokens", "tokens_missing", "tokens_filled", "bytes_total", "bytes_missing", "bytes_filled"),
    *("tokens_per_s", "seconds_left", "elapsed_s", "fits", "tiers"),
)


def parse_spec(text: str) -> JobSpec:
    """Parse a spec from JSON. Raises `InvalidField` and `UnknownField`."""
    if len(text) > SPEC_BYTES_MAX:
        raise InvalidField("spec_json", f"has {len(text)} bytes; at most {SPEC_BYTES_MAX} are read")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField("spec_json", f"is not JSON ({error})") from None
    return load(JobSpec, values, "spec")


def job_to_wire(entry: JobEntry) -> pb.Job:
    progress = entry.progress
    return pb.Job(
        job_id=entry.job_id,
        spec_json=entry.spec.to_json(),
        dry_run=entry.dry,
        state=pb.JobState.Value(f"JOB_STATE_{progress.state.name}"),
        failures=[
            pb.DocumentFailure(url=f.url, place=f.place, document_id=f.document_id, reason=f.reason)
            for f in progress.failures
        ],
        **{name: getattr(progress, name) for name in _COPIED},
    )


class PrecomputeServicer(precompute_pb2_grpc.PrecomputeServicer):
    """Nothing here blocks the event loop: a job's thread does the work."""

    def __init__(self, manager: JobManager) -> None:
        self._manager = manager

    async def _answer_with_job(self, context: Any, answer: Callable[[], JobEntry]) -> pb.Job:
        return job_to_wire(await _or_abort(context, answer))

    async def Submit(self, request: pb.SubmitJobRequest, context: Any) -> pb.Job:  # noqa: N802
        return await self._answer_with_job(
            context, lambda: self._manager.submit(parse_spec(request.spec_json), request.dry_run)
        )

    async def Get(self, request: pb.GetJobRequest, context: Any) -> pb.Job:  # noqa: N802
        return await self._answer_with_job(context, lambda: self._manager.get(request.job_id))

    async def Cancel(self, request: pb.CancelJobRequest, context: Any) -> pb.Job:  # noqa: N802
        return await self._answer_with_job(context, lambda: self._manager.cancel(request.job_id))

    async def Pause(self, request: pb.PauseJobRequest, context: Any) -> pb.Job:  # noqa: N802
        return await self._answer_with_job(context, lambda: self._manager.pause(request.job_id, True))

    async def Resume(self, request: pb.ResumeJobRequest, context: Any) -> pb.Job:  # noqa: N802
        return await self._answer_with_job(context, lambda: self._manager.pause(request.job_id, False))

    async def List(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:  # noqa: N802
        entries = await asyncio.to_thread(self._manager.list)
        return pb.ListJobsResponse(jobs=[job_to_wire(entry) for entry in entries])

    async def Watch(self, request: pb.WatchJobRequest, context: Any) -> AsyncIterator[pb.Job]:  # noqa: N802
        entry = await _or_abort(context, lambda: self._manager.get(request.job_id))
        sent: Progress | None = None
        while True:
            progress = entry.progress
            if progress is not sent:
                sent = progress
                job = job_to_wire(entry)
                yield job
                if job.state in (pb.JOB_STATE_DONE, pb.JOB_STATE_CANCELLED, pb.JOB_STATE_FAILED):
                    return
            await asyncio.sleep(WATCH_PERIOD_S)


async def _or_abort(context: Any, answer: Callable[[], Answer]) -> Answer:
    try:
        return await asyncio.to_thread(answer)
    except KintsugiError as error:
        await abort_call(context, error)
        raise


async def serve(
    manager: JobManager,
    listen: str,
    on_ready: Callable[[str], None],
    until: Callable[[], Awaitable[Any]],
) -> None:
    """Serve on `listen`, call `on_ready` with the address, and stop when `until` returns. Loopback only,
    because a client that submits jobs can read every file that the server can read.

    Raises `Unavailable` if the address cannot be bound, `InvalidField` if it is not on loopback.
    """
    try:
        check_listen(listen, None, False)
    except InvalidField:
        raise InvalidField(
            "listen",
            f"{listen!r} must be host:port on loopback; beyond it, mount the service on a server that "
            "controls access",
        ) from None
    server = grpc.aio.server(options=SERVER_OPTIONS)
    precompute_pb2_grpc.add_PrecomputeServicer_to_server(PrecomputeServicer(manager), server)
    health = health_aio.HealthServicer()
    add_HealthServicer_to_server(health, server)
    enable_server_reflection((SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE), server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {listen}: {error}") from error
    await server.start()
    for service in ("", SERVICE):
        await health.set(service, HealthCheckResponse.SERVING)
    on_ready(f"{listen.rsplit(':', 1)[0]}:{port}")
    try:
        await until()
    finally:
        await server.stop(1.0)

"""The gRPC service `Precompute`, which can be mounted on any `grpc.aio` server.

    add_PrecomputeServicer_to_server(PrecomputeServicer(JobManager(state)), server)

Callers are known by a tokens file; what their jobs may use is the manager's policy. `serve` serves it alone,
on loopback.
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

from kintsugi.core.errors import InvalidField, KintsugiError, NotFound, PermissionDenied, Unavailable
from kintsugi.core.schema import load
from kintsugi.precompute.manager import JobEntry, JobManager
from kintsugi.precompute.progress import Progress
from kintsugi.precompute.spec import JobSpec
from kintsugi.rpc.v1 import precompute_pb2 as pb
from kintsugi.rpc.v1 import precompute_pb2_grpc
from kintsugi.store.protocol.access import Access
from kintsugi.store.protocol.callers import Caller, Verb, parse_bearer
from kintsugi.store.protocol.server_options import SERVER_OPTIONS
from kintsugi.store.protocol.status import abort_call
from kintsugi.store.protocol.tls import check_listen

SERVICE = "kintsugi.rpc.v1.Precompute"
HEALTH_CHECK = f"/{HEALTH_SERVICE}/Check"
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

    def __init__(self, manager: JobManager, access: Access | None = None) -> None:
        """``access``: who may call. By default everybody who reaches the server."""
        self._manager = manager
        self._access = access or Access()

    async def _answer_with_job(self, context: Any, answer: Callable[[Caller], JobEntry]) -> pb.Job:
        return job_to_wire(await self._answer(context, answer))

    async def _answer(self, context: Any, answer: Callable[[Caller], Answer]) -> Answer:
        return await _or_abort(
            context, lambda: answer(_caller_of(self._access, context.invocation_metadata()))
        )

    def _find_job(self, caller: Caller, job_id: str, verb: Verb) -> JobEntry:
        """A job of the caller's namespaces. Raises `NotFound` and `PermissionDenied`."""
        entry = self._manager.get(job_id)
        if not caller.may_use(entry.spec.namespace):
            raise NotFound(f"job {job_id!r} is not known; List returns the jobs that are")
        caller.require(verb)
        return entry

    def _submit(self, caller: Caller, request: pb.SubmitJobRequest) -> JobEntry:
        """Raises `PermissionDenied` for a namespace or corpus that belongs to others."""
        spec = parse_spec(request.spec_json)
        # Chunks that no document has any more are deleted at a job's end.
        for verb in (Verb.LIST,) if request.dry_run else (Verb.PUT, Verb.DELETE):
            caller.authorize(spec.namespace, verb)
        if any(not caller.may_use(namespace) for namespace in self._manager.namespaces_of(spec.corpus_name)):
            raise PermissionDenied(f"corpus {spec.corpus_name!r} belongs to others; choose another name")
        return self._manager.submit(spec, request.dry_run)

    def _list_jobs(self, caller: Caller) -> list[JobEntry]:
        caller.require(Verb.LIST)
        return [entry for entry in self._manager.list() if caller.may_use(entry.spec.namespace)]

    async def Submit(self, request: pb.SubmitJobRequest, context: Any) -> pb.Job:  # noqa: N802
        return await self._answer_with_job(context, lambda caller: self._submit(caller, request))

    async def Get(self, request: pb.GetJobRequest, context: Any) -> pb.Job:  # noqa: N802
        return await self._answer_with_job(
            context, lambda caller: self._find_job(caller, request.job_id, Verb.LIST)
        )

    async def Cancel(self, request: pb.CancelJobRequest, context: Any) -> pb.Job:  # noqa: N802
        return await self._answer_with_job(
            context,
            lambda caller: self._manager.cancel(self._find_job(caller, request.job_id, Verb.PUT).job_id),
        )

    async def Pause(self, request: pb.PauseJobRequest, context: Any) -> pb.Job:  # noqa: N802
        return await self._answer_with_job(context, lambda caller: self._pause(caller, request.job_id, True))

    async def Resume(self, request: pb.ResumeJobRequest, context: Any) -> pb.Job:  # noqa: N802
        return await self._answer_with_job(context, lambda caller: self._pause(caller, request.job_id, False))

    def _pause(self, caller: Caller, job_id: str, paused: bool) -> JobEntry:
        return self._manager.pause(self._find_job(caller, job_id, Verb.PUT).job_id, paused)

    async def List(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:  # noqa: N802
        entries = await self._answer(context, self._list_jobs)
        return pb.ListJobsResponse(jobs=[job_to_wire(entry) for entry in entries])

    async def Watch(self, request: pb.WatchJobRequest, context: Any) -> AsyncIterator[pb.Job]:  # noqa: N802
        entry = await self._answer(context, lambda caller: self._find_job(caller, request.job_id, Verb.LIST))
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


def _caller_of(access: Access, metadata: Any) -> Caller:
    """Raises `Unauthenticated`."""
    return access.caller(parse_bearer(dict(metadata or ()).get("authorization")))


class _TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses strangers before their message is received. Only the health check is for everybody."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if details.method == HEALTH_CHECK:
            return handler
        try:
            _caller_of(self._access, details.invocation_metadata)
        except KintsugiError as error:
            return _build_refusal(error)
        return handler


def _build_refusal(error: KintsugiError) -> Any:
    async def refuse(requests: Any, context: Any) -> None:
        await abort_call(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


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
    access: Access | None = None,
) -> None:
    """Serve on `listen`, call `on_ready` with the address, and stop when `until` returns. Loopback only,
    because tokens travel unencrypted. ``access``: who may call; by default everybody on this machine.

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
    access = access or Access()
    server = grpc.aio.server(interceptors=(_TokenGuard(access),), options=SERVER_OPTIONS)
    precompute_pb2_grpc.add_PrecomputeServicer_to_server(PrecomputeServicer(manager, access), server)
    health = health_aio.HealthServicer()
    add_HealthServicer_to_server(health, server)
    enable_server_reflection((SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE), server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise Unavailable(
            f"cannot listen on {listen}: {error}; name another port with --listen (port 0: any free one)"
        ) from error
    await server.start()
    for service in ("", SERVICE):
        await health.set(service, HealthCheckResponse.SERVING)
    on_ready(f"{listen.rsplit(':', 1)[0]}:{port}")
    try:
        await until()
    finally:
        await server.stop(1.0)

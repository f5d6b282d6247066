"""Decides when a corpus is filled: after each change of its spec or the model, and as scheduled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.manifest import non_default_manifest
from kintsugi_operator.api.status import Condition, CorpusPrecomputeStatus
from kintsugi_operator.desired.plan import sign
from kintsugi_operator.desired.schedule import last_tick
from kintsugi_operator.objects.base import Owner
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.jobs import corpus_job, ledger_claim
from kintsugi_operator.objects.names import digest, ray_named
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed import conditions as c
from kintsugi_operator.observed.views import JobState, JobView, Refusal, digest_of

WITHOUT_RERUN = ("suspend", "schedule")
"""Fields of a spec that may change without the corpus being filled again."""
WITHOUT_RERUN_EXPERT = ("ttlS", "ledgerGib")
"""Fields of `expert` that may change likewise."""
TICK = "%Y%m%d%H%M"
COUNTS = ("documents", "documents_failed", "chunks", "chunks_failed")


@dataclass(frozen=True)
class Target:
    """The service that a corpus is for."""

    spec: BlendServiceSpec
    revision: EngineRevision
    """The revision to fill the corpus for: a pending revision serves only after its corpora are filled."""
    is_store_ready: bool


@dataclass(frozen=True)
class CorpusObserved:
    """What the operator observed of a corpus."""

    target: Target | None = None
    """None: the service does not exist or is invalid."""
    jobs: Mapping[str, JobView] = field(default_factory=dict)
    """By name."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the current job, as `kintsugi precompute --json` prints them; empty before it has ended."""
    refusal: Refusal | None = None
    """Why the job does not start."""


@dataclass(frozen=True)
class CorpusDesired:
    """The objects of a corpus and its status."""

    objects: tuple[Manifest, ...]
    status: CorpusPrecomputeStatus
    superfluous: tuple[str, ...] = ()
    """Names of RayJobs to delete: those of former runs, and one that must be recreated."""


def basis_of(spec: CorpusPrecomputeSpec, revision: EngineRevision) -> str:
    """Digest of everything that a corpus's chunks depend on."""
    asked = non_default_manifest(spec)
    expert = asked.pop("expert", {})
    kept = {key: value for key, value in asked.items() if key not in WITHOUT_RERUN}
    kept |= {key: value for key, value in expert.items() if key not in WITHOUT_RERUN_EXPERT}
    return digest([kept, revision.name])


def next_run(
    spec: CorpusPrecomputeSpec, revision: EngineRevision, run: str, job: JobView, now: datetime
) -> str:
    """The run that is wanted now, as `BASIS-REVISION-TICK`. A new tick waits for a running job to end; a
    changed spec or model does not."""
    tick = last_tick(spec.schedule, now) if spec.schedule else None
    stamp = tick.strftime(TICK) if tick is not None else "once"
    wanted = f"{basis_of(spec, revision)}-{revision.name}-{stamp}"
    if not run or run.split("-")[0] != wanted.split("-")[0]:
        return wanted
    is_over = job.state.is_final or job.state is JobState.ABSENT
    # A changed or removed schedule can yield an older tick. It starts no run.
    is_later = stamp != "once" and (run.endswith("-once") or stamp > run.rsplit("-", 1)[1])
    return wanted if is_over and is_later else run


def plan_corpus(
    spec: CorpusPrecomputeSpec,
    owner: Owner,
    before: CorpusPrecomputeStatus,
    observed: CorpusObserved,
    now: datetime,
) -> CorpusDesired:
    """Decide about a corpus. Raises `InvalidField` for a schedule that `check_corpus` refuses."""
    target = observed.target
    if target is None:
        missing = c.false(
            c.READY,
            "NoService",
            f"this namespace has no valid BlendService {spec.service}: create it, or name another",
        )
        status = replace(before, phase="Waiting", conditions=(c.true(c.VALID, "Accepted"), missing))
        return CorpusDesired((), status)
    former = observed.jobs.get(before.job, JobView())
    run = next_run(spec, target.revision, before.run, former, now)
    name = ray_named(owner.name, digest(run))
    job = observed.jobs.get(name, JobView(name=name))
    was_done = run == before.run and before.phase in ("Succeeded", "Failed")
    objects, gone = [sign(ledger_claim(spec, owner))], set(observed.jobs) - {name}
    if job.state.is_final or was_done:
        pass  # the job has ended and never changes again
    elif job.state is not JobState.ABSENT or (target.is_store_ready and not spec.suspend):
        wanted = sign(corpus_job(spec, owner, target.spec, target.revision, digest(run)))
        if _must_replace(job, wanted, spec):
            gone.add(name)  # the next reconciliation creates it
        else:
            objects.append(wanted)
    return CorpusDesired(
        tuple(objects),
        _status(spec, before, observed, run, job, was_done, now),
        tuple(sorted(gone)),
    )


def _must_replace(job: JobView, wanted: Manifest, spec: CorpusPrecomputeSpec) -> bool:
    """Whether a job's pods must be recreated. KubeRay ignores a changed template, and a job that never
    reached Ray has nothing to lose (`observed.protection`)."""
    return (
        job.state is JobState.RUNNING
        and not job.has_begun
        and not spec.suspend
        and job.digest != digest_of(wanted)
    )


def _status(
    spec: CorpusPrecomputeSpec,
    before: CorpusPrecomputeStatus,
    observed: CorpusObserved,
    run: str,
    job: JobView,
    was_done: bool,
    now: datetime,
) -> CorpusPrecomputeStatus:
    phase = before.phase if was_done and not job.state.is_final else _phase(spec, observed, job)
    ended = phase == "Succeeded" and not (run == before.run and before.phase == "Succeeded")
    figures = observed.figures
    status = replace(before, run=run, job=job.name, phase=phase)
    if run != before.run and (tick := run.rsplit("-", 1)[1]) != "once":
        moment = datetime.strptime(tick, TICK).replace(tzinfo=UTC)
        status = replace(status, last_schedule_time=c.timestamp(moment))
    if figures:
        counts: dict[str, Any] = {name: int(figures.get(name, 0)) for name in COUNTS}
        status = replace(status, **counts, coverage=round(float(figures.get("coverage", 0.0)), 4))
    if ended:
        status = replace(status, last_success_time=c.timestamp(now))
    conditions = (
        c.true(c.VALID, "Accepted"),
        c.true(c.READY, "ServiceFound"),
        _complete(phase, job, observed.refusal),
    )
    return replace(status, conditions=conditions)


def _phase(spec: CorpusPrecomputeSpec, observed: CorpusObserved, job: JobView) -> str:
    if job.state is not JobState.ABSENT:
        return str(job.state)
    if spec.suspend:
        return str(JobState.SUSPENDED)
    if observed.target is not None and observed.target.is_store_ready:
        return "Starting"
    return "Waiting"


def _complete(phase: str, job: JobView, refusal: Refusal | None) -> Condition:
    messages = {
        "Waiting": "the service's store is not ready",
        "Starting": f"RayJob {job.name} is being created",
        "Running": f"RayJob {job.name} is running",
        "Suspended": "suspend is set: unset it to continue",
        "Failed": f"{job.message or 'the job failed'}. See RayJob {job.name}. Chunks that were stored "
        "remain, and a changed spec starts a new run",
    }
    if phase == "Succeeded":
        return c.true(
            c.COMPLETE, "Filled", "requests find its chunks by text or token ids, not by document id"
        )
    message = messages.get(phase, phase)
    if phase == "Running" and refusal is not None:
        return c.false(c.COMPLETE, refusal.reason, f"{message}; {refusal.message}")
    return c.false(c.COMPLETE, phase, message)


def figures_in(log: str) -> Mapping[str, Any]:
    """The last report in a job's log, which also contains Ray's lines; empty if there is no report."""
    decoder = json.JSONDecoder()
    start = log.rfind("\n{")
    while start >= 0 or log.startswith("{"):
        try:
            value, _ = decoder.raw_decode(log[start + 1 :])
        except ValueError:
            value = None
        if isinstance(value, dict) and "documents" in value and "chunks" in value:
            return value
        if start <= 0:
            break
        start = log.rfind("\n{", 0, start)
    return {}

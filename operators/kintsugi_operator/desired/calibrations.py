"""Which calibrations have ended: their RayJobs may be deleted, by a person or by KubeRay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kintsugi_operator.api.status import CalibrationStatus
from kintsugi_operator.observed.views import JobState, JobView

FAILURES_MAX = 3
"""A failed calibration whose RayJob is deleted runs again, at most so often: KubeRay may delete every one."""


def all_calibrations(
    records: Sequence[CalibrationStatus], live: Mapping[str, JobView]
) -> Mapping[str, JobView]:
    """The calibrations by revision: those with a RayJob, and those that have ended and have none any more.

    The latter have no name. A failed one is not among them while it may run again.
    """
    done = {one.revision: JobView(JobState.SUCCEEDED) for one in records if one.state == JobState.SUCCEEDED}
    failed = {
        one.revision: JobView(JobState.FAILED, one.message)
        for one in records
        if one.state == JobState.FAILED and one.failures >= FAILURES_MAX
    }
    return {**done, **failed, **live}


def record_calibrations(
    records: Sequence[CalibrationStatus], live: Mapping[str, JobView], revisions: Collection[str]
) -> tuple[CalibrationStatus, ...]:
    """What to remember of these revisions' calibrations."""
    kept = {one.revision: one for one in records}
    for revision, job in live.items():
        former = kept.get(revision)
        if job.state is JobState.SUCCEEDED:
            kept[revision] = CalibrationStatus(revision, str(job.state))
        elif job.state is JobState.FAILED and (former is None or former.job != job.uid):
            failures = (former.failures if former is not None else 0) + 1
            kept[revision] = CalibrationStatus(revision, str(job.state), job.message, failures, job.uid)
    return tuple(one for revision, one in sorted(kept.items()) if revision in revisions)

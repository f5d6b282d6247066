"""A calibration that has ended is remembered in the status, whatever becomes of its RayJob."""

from __future__ import annotations

import pytest

from kintsugi_operator.desired.plan import FAILURES_MAX
from tests.unit.operator.test_reconcile import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_calibration_that_is_done_does_not_run_again(world: World, is_restarted: bool) -> None:
    """A person or KubeRay deletes its RayJob."""
    world.up()
    (job,) = world.cluster.named("RayJob")
    world.cluster.lose("RayJob", job)
    if is_restarted:
        world.reconciler = world.restart()
    world.settle()
    assert world.cluster.named("RayJob") == []
    assert world.condition("Calibrated")["reason"] == "ReportWritten"
    # Another model is another matter.
    world.make(model={"path": "/models/other"})
    world.settle()
    assert len(world.cluster.named("RayJob")) == 1


def test_a_failed_calibration_runs_again_when_its_job_is_deleted_but_not_for_ever(world: World) -> None:
    world.make()
    world.settle()
    world.kuberay.serve("acme-store")
    world.settle()
    for attempt in range(FAILURES_MAX):
        (job,) = world.cluster.named("RayJob")
        world.cluster.find("RayJob", job)["metadata"]["uid"] = f"attempt-{attempt}"
        world.kuberay.finish(job, "FAILED", message="no selector passes")
        world.settle()
        assert "delete it to try again" in world.condition("Calibrated")["message"]
        world.cluster.lose("RayJob", job)
        world.settle()
    assert world.cluster.named("RayJob") == []
    said = world.condition("Calibrated")
    assert (said["reason"], f"failed {FAILURES_MAX} times" in said["message"]) == ("Failed", True)
    assert "no selector passes" in said["message"]

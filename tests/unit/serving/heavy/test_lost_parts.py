"""Which processes count as lost, and why; Ray's own messages in a table that a test makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="install the extra `serving`")

from ray._private.state import GlobalState
from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext, OomContext

from kintsugi.core.errors import Unavailable
from kintsugi.core.exchange import LossReason, LostPart
from kintsugi.serving import lost_parts
from kintsugi.serving.lost_parts import LOSSES_MAX, LostParts, count_kernel_kills, part_of

ENGINE = "ServeReplica:kintsugi:Engine"
CRASH = "Worker exit type: SYSTEM_ERROR Worker exit detail: connection error code 2. End of file."
EXIT = "Worker exit type: INTENDED_USER_EXIT Worker exit detail: exit code 0"


def died(reason: str, message: str = CRASH) -> ActorDeathCause:
    value = ActorDiedErrorContext.Reason.Value(reason)
    context = ActorDiedErrorContext(reason=value, error_message=message)
    return ActorDeathCause(actor_died_error_context=context)


def actor(
    name: str, state: str = "DEAD", cause: ActorDeathCause | None = None, **more: Any
) -> dict[str, Any]:
    found = {"ActorClassName": name, "State": state, "DeathCause": cause or died("WORKER_DIED"), "Pid": 7}
    return {**found, "NumRestarts": 0, "Timestamp": 1000.0, "EndTime": 2000, **more}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    actors: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(GlobalState, "actor_table", lambda self, actor_id: dict(actors))
    return actors


@pytest.fixture
def kernel_kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    kills = [0]
    monkeypatch.setattr(lost_parts, "count_kernel_kills", lambda: kills[0])
    return kills


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (died("WORKER_DIED"), LossReason.KILLED),
        (died("NODE_DIED"), LossReason.NODE),
        (ActorDeathCause(oom_context=OomContext(error_message="full")), LossReason.RAY_MEMORY),
        (died("WORKER_DIED", EXIT), None),
        (died("RAY_KILL"), None),
        (died("OUT_OF_SCOPE"), None),
        (ActorDeathCause(), None),
    ],
)
def test_a_replica_is_lost_unless_it_was_stopped(
    table: dict[str, dict[str, Any]],
    kernel_kills: list[int],
    cause: ActorDeathCause,
    reason: LossReason | None,
) -> None:
    table["a"] = actor(ENGINE, cause=cause)
    found = [] if reason is None else [LostPart("Engine", 7, 2.0, reason)]
    lost = LostParts()
    assert lost.find_new() == found
    assert lost.find_new() == []
    assert list(lost.losses) == found


def test_each_restart_of_the_directory_is_a_loss(
    table: dict[str, dict[str, Any]], kernel_kills: list[int]
) -> None:
    lost, running = LostParts(), actor("DirectoryActor", "ALIVE")
    table["d"] = running
    assert lost.find_new() == []
    for restarts in (1, 2):
        running["NumRestarts"] = restarts
        assert lost.find_new() == [LostPart("Directory", 0, 1.0, LossReason.KILLED)]
        assert lost.find_new() == []


def test_a_kill_of_the_kernel_explains_what_ends_with_it(
    table: dict[str, dict[str, Any]], kernel_kills: list[int]
) -> None:
    lost = LostParts()
    kernel_kills[0] = 1
    table["a"] = actor(ENGINE)
    (one,) = lost.find_new()
    assert one.reason is LossReason.KERNEL_MEMORY
    assert str(one).startswith(
        "Engine (process 7) was ended by the kernel because memory ran out; stop other"
    )
    table["b"] = actor(ENGINE)
    assert [one.reason for one in lost.find_new()] == [LossReason.KILLED], "a later loss has its own cause"


@pytest.mark.parametrize("name", ["ServeReplica:other:Engine", "Worker", "ServeReplica:kintsugi-other:X"])
def test_actors_of_others_are_none_of_ours(table: dict[str, dict[str, Any]], name: str) -> None:
    table["a"] = actor(name)
    assert part_of(name) == ""
    assert LostParts().find_new() == []


def test_only_the_last_losses_are_remembered(
    table: dict[str, dict[str, Any]], kernel_kills: list[int]
) -> None:
    table |= {str(number): actor(ENGINE, EndTime=number + 1) for number in range(LOSSES_MAX + 3)}
    lost = LostParts()
    assert len(lost.find_new()) == LOSSES_MAX + 3
    assert len(lost.losses) == LOSSES_MAX
    assert lost.losses[-1].at_s == (LOSSES_MAX + 3) / 1e3


def test_a_ray_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: GlobalState, actor_id: None) -> None:
        raise RuntimeError("no GCS")

    monkeypatch.setattr(GlobalState, "actor_table", fail)
    with pytest.raises(Unavailable, match="no GCS"):
        LostParts().find_new()


@pytest.mark.parametrize(("text", "count"), [("pgfault 9\noom_kill 3\n", 3), ("pgfault 9\n", 0), (None, 0)])
def test_the_kernel_counts_its_kills(tmp_path: Path, text: str | None, count: int) -> None:
    file = tmp_path / "vmstat"
    if text is not None:
        file.write_text(text)
    assert count_kernel_kills(file) == count

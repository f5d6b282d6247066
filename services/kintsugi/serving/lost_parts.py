"""Finds the processes of the service that ended unexpectedly, in the actor table of Ray's GCS.

Ray writes them to its own logs alone. The table remembers the last dead actors
(`RAY_maximum_gcs_destroyed_actor_cached_count`), so a gateway that was restarted reports earlier losses, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kintsugi.core.deploy import SERVICE_APP, STORE_APP
from kintsugi.core.errors import Unavailable
from kintsugi.core.exchange import LossReason, LostPart

PARTS = {"DirectoryActor": "Directory", "ServeController": "ServeController"}
"""Parts by the class of their actors, which Ray restarts in place. All others are replicas of Serve."""
REPLICAS = tuple(f"ServeReplica:{app}:" for app in (STORE_APP, SERVICE_APP))
LOSSES_MAX = 256
"""Maximum number of losses that a process remembers."""
VMSTAT = Path("/proc/vmstat")


def count_kernel_kills(vmstat: Path = VMSTAT) -> int:
    """Return how many processes of this machine the kernel has ended for lack of memory; 0 if unknown."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:  # not Linux
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def part_of(class_name: str) -> str:
    """Return the part to which an actor of this class belongs; empty for other actors."""
    prefix = next((one for one in REPLICAS if class_name.startswith(one)), None)
    return PARTS.get(class_name, "") if prefix is None else class_name.removeprefix(prefix)


def loss_of(actor: dict[str, Any]) -> LossReason | None:
    """Return why an actor of the table ended; None if it runs, was stopped, or failed to start."""
    if actor["State"] == "DEAD":
        cause = actor["DeathCause"]
        kind = cause.WhichOneof("context")
        if kind == "oom_context":
            return LossReason.RAY_MEMORY
        if kind != "actor_died_error_context":
            return None
        died = cause.actor_died_error_context
        reason = died.Reason.Name(died.reason)
        if reason == "NODE_DIED":
            return LossReason.NODE
        return LossReason.KILLED if reason == "WORKER_DIED" and "INTENDED" not in died.error_message else None
    return LossReason.KILLED if actor["NumRestarts"] else None


class LostParts:
    """The parts that were lost since Ray started. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, int], None] = {}
        self._losses: deque[LostPart] = deque(maxlen=LOSSES_MAX)
        self._kernel_kills = count_kernel_kills()

    @property
    def losses(self) -> Sequence[LostPart]:
        """The losses that `find_new` has found, oldest first; the last `LOSSES_MAX`."""
        with self._lock:
            return tuple(self._losses)

    def find_new(self) -> list[LostPart]:
        """Look for losses, and return the new ones. Blocks for some milliseconds. Raises
        `Unavailable` if Ray does not answer."""
        from ray._private.state import state
        from ray.exceptions import RayError

        kills = count_kernel_kills()
        try:
            table = state.actor_table(None)
        except (RayError, RuntimeError, OSError) as error:
            raise Unavailable(f"Ray does not list its processes ({error})") from error
        with self._lock:
            found = self._add(table, kills > self._kernel_kills)
            self._kernel_kills = kills
        return found

    def _add(self, table: dict[str, dict[str, Any]], has_kernel_killed: bool) -> list[LostPart]:
        lost = {}
        for name, actor in table.items():
            part, reason = part_of(actor["ActorClassName"]), loss_of(actor)
            if part and reason is not None:
                lost[name, actor["NumRestarts"]] = part, reason, actor
        found = []
        for key in lost.keys() - self._seen.keys():
            part, reason, actor = lost[key]
            if reason is LossReason.KILLED and has_kernel_killed:
                reason = LossReason.KERNEL_MEMORY
            is_dead = actor["State"] == "DEAD"
            # For a restarted actor, the table has the new process, but the time of the first start.
            at_ms = actor["EndTime"] if is_dead else actor["Timestamp"]
            found.append(LostPart(part, actor["Pid"] if is_dead else 0, at_ms / 1e3, reason))
        self._seen = dict.fromkeys(lost)
        found.sort(key=lambda one: one.at_s)
        self._losses.extend(found)
        return found

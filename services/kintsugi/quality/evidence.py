"""What the engines of one model have seen while shadowing, shared through one small document of the store.

Every engine publishes its latest deviations and reads those of the others, and its detector treats all of
them as one stream of observations. So N engines together need as many shadowed requests as one alone. This
is valid without any rule for combining evidence: the test bets on each observation, whichever engine made
it, and the order in which they arrive does not depend on their values. It also keeps evidence when an engine
restarts.

The document belongs to one calibration; a new one starts with an empty document. An engine replaces the
document with what it has read and its own part. If two write at the same time, the part of one is missing
until that engine writes again. A part that stays missing delays the detection of a drift; it never causes a
false alarm.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from kintsugi.core.baseline import Deviation
from kintsugi.core.errors import Corrupted, InvalidField, KintsugiError
from kintsugi.core.report import Binding, ReportRevision, open_document, seal_document
from kintsugi.core.schema import STRICT, load
from kintsugi.quality.metrics import KL_MAX
from kintsugi.store.protocol.interface import ChunkStore

logger = logging.getLogger(__name__)

ENGINES_MAX = 32
"""Maximum number of parts of a document. The part that was written longest ago is dropped first."""
DEVIATIONS_MAX = 128
"""Maximum number of deviations of a part. The oldest are dropped first."""
ANSWER_TOKENS_MAX = 1 << 20
"""Maximum number of positions of a deviation. It is larger than any answer, and its averages do not
overflow."""
_DIGITS = 6
_TICK = timedelta(milliseconds=1)
"""The resolution of `Evidence.created`."""


@dataclass(frozen=True)
class EngineEvidence:
    """The deviations that one engine measured."""

    __pydantic_config__ = STRICT

    engine: str
    """An id that differs between engines and between starts."""
    count: int
    """Number of deviations so far, including those that are no longer listed."""
    latest: tuple[tuple[float, float, int], ...]
    """KL in nats, disagreement and positions of each deviation; the newest is last."""

    def __post_init__(self) -> None:
        if not 0 < len(self.engine) <= 64:
            raise InvalidField("evidence.engine", "must have 1 to 64 characters")
        if len(self.latest) > min(self.count, DEVIATIONS_MAX):
            raise InvalidField("evidence.latest", f"lists {len(self.latest)} deviations of {self.count}")
        for values in self.latest:
            one = Deviation(*values)
            if one.kl > KL_MAX or one.positions > ANSWER_TOKENS_MAX:
                raise InvalidField("evidence.latest", "lists an impossible deviation")

    def since(self, count: int) -> list[Deviation]:
        """Return the listed deviations after the first `count`; none if there are fewer."""
        new = min(max(self.count - count, 0), len(self.latest))
        return [Deviation(*values) for values in self.latest[len(self.latest) - new :]]


@dataclass(frozen=True)
class Evidence:
    """The deviations that all engines measured since one calibration."""

    __pydantic_config__ = STRICT

    calibration: str
    """`CalibrationReport.created`."""
    created: str
    """ISO 8601, UTC. It orders the copies on different shards, as in reports."""
    engines: tuple[EngineEvidence, ...]
    """In the order in which they were written."""

    def __post_init__(self) -> None:
        if len(self.engines) > ENGINES_MAX:
            raise InvalidField("evidence.engines", f"{len(self.engines)} parts; at most {ENGINES_MAX}")

    def to_bytes(self) -> bytes:
        return seal_document(dataclasses.asdict(self))

    @staticmethod
    def from_bytes(document: bytes) -> Evidence:
        """Parse a document. Raises `Corrupted` if it does not hold evidence."""
        try:
            return load(Evidence, open_document(document), "evidence")
        except InvalidField as error:
            raise Corrupted(f"the shadows' evidence is not readable: {error}") from None


def evidence_name(binding: Binding) -> str:
    """Return the name under which a store keeps the evidence of the engines with this binding."""
    return f"evidence/{binding.report_name}"


class EvidencePool:
    """One engine's access to the shared evidence. Not thread-safe; calls block on the store."""

    def __init__(
        self,
        store: ChunkStore,
        binding: Binding,
        engine: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._address = binding.model, evidence_name(binding)
        self._engine = engine
        self._now = now
        self._calibration = ""
        self._own: list[Deviation] = []
        self._count = 0
        self._seen: dict[str, int] = {}

    def exchange(self, calibration: str, mine: Sequence[Deviation]) -> list[Deviation]:
        """Publish this engine's deviations since the last call. Return those of other engines since then.

        A `calibration` that differs from the last one starts without evidence. If the store does not answer
        or holds another document, nothing is returned, and the engine's deviations are published next time.
        """
        if calibration != self._calibration:
            self._calibration, self._own, self._count, self._seen = calibration, [], 0, {}
        self._own = [*self._own, *mine][-DEVIATIONS_MAX:]
        self._count += len(mine)
        new: list[Deviation] = []
        try:
            document = self._store.get_report(*self._address)
            merged = self._merge(document)
            new = self._take_new(merged)
            self._store.put_report(*self._address, merged.to_bytes())
        except KintsugiError as error:
            logger.warning("engines cannot share their shadowed requests: %s", error)
        return new

    def _merge(self, document: bytes | None) -> Evidence:
        """Return the document to write: the parts of other engines for this calibration, and this
        engine's."""
        now, found = self._now(), None
        if document is not None:
            now = max(now, ReportRevision.of(document).created + _TICK)
            try:
                found = Evidence.from_bytes(document)
            except Corrupted as error:
                logger.warning("%s; it is replaced", error)
        same = found.engines if found is not None and found.calibration == self._calibration else ()
        others = [part for part in same if part.engine != self._engine]
        latest = tuple(
            (round(one.kl, _DIGITS), round(one.disagreement, _DIGITS), one.positions) for one in self._own
        )
        own = EngineEvidence(self._engine, self._count, latest)
        created = now.isoformat(timespec="milliseconds")
        return Evidence(self._calibration, created, (*others[1 - ENGINES_MAX :], own))

    def _take_new(self, merged: Evidence) -> list[Deviation]:
        others = [part for part in merged.engines if part.engine != self._engine]
        new = [one for part in others for one in part.since(self._seen.get(part.engine, 0))]
        self._seen = {part.engine: part.count for part in others}
        return new

"""What calibration measured of one model, and whether blending it may be trusted.

Blending is an approximation, and how good it is depends on the model. A `CalibrationReport` holds what was
measured against full prefill, the thresholds, and what follows from both; `choose` is the whole decision.
A report belongs to one `Binding`: another model, prefix, codec or engine version makes it say nothing.
It carries a digest over its canonical JSON, so that one edited by hand is refused. The digest is no
signature: who may write to the store may write a report.

Several copies of a report are stored, and several processes write it. `supersedes` says which copy counts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import blake3

from kintsugi.core.baseline import Baseline
from kintsugi.core.errors import Corrupted, InvalidField, VersionMismatch
from kintsugi.core.plan import Selection
from kintsugi.core.schema import STRICT, load
from kintsugi.core.spaces import ModelFingerprint, token_bytes

REPORT_VERSION = 1
REPORT_BYTES_MAX = 1 << 20
"""What a store keeps of one document; a larger one is not even parsed."""

RATIO_TOLERANCE = 1e-9

_STEP = timedelta(seconds=1)
"""The resolution of `CalibrationReport.created`."""
_OLDEST = datetime.min.replace(tzinfo=UTC)
_LATEST = datetime.max.replace(tzinfo=UTC) - _STEP


@dataclass(frozen=True)
class Binding:
    """What a report speaks about. All of it decides the KV that a blend produces."""

    __pydantic_config__ = STRICT

    fingerprint: str
    """The model's fingerprint, hexadecimal."""
    prefix: str
    """Digest of the tokens that chunks were prefilled behind."""
    codec: str
    vllm: str
    kintsugi: str

    @staticmethod
    def of(
        fingerprint: ModelFingerprint, prefix_token_ids: Sequence[int], codec: str, vllm: str, kintsugi: str
    ) -> Binding:
        prefix = blake3.blake3(b"kintsugi-prefix\0" + token_bytes(prefix_token_ids)).hexdigest()[:32]
        return Binding(fingerprint.hex, prefix, codec, vllm, kintsugi)

    @property
    def model(self) -> ModelFingerprint:
        return ModelFingerprint(bytes.fromhex(self.fingerprint))

    @property
    def report_name(self) -> str:
        """The name under which a store keeps the report. Engines of two versions keep two reports, so that
        upgrading one does not take the other's away."""
        version = blake3.blake3(f"{self.vllm}\0{self.kintsugi}".encode()).hexdigest()[:16]
        return f"calibration/{self.codec}/{self.prefix}/{version}"

    def difference(self, other: Binding) -> str | None:
        """The first field that differs, in words; None where none does."""
        for one in dataclasses.fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if mine != theirs:
                return f"{one.name} is {theirs[:16]}, not {mine[:16]}"
        return None


def family(selection: Selection) -> Selection:
    """What two selections share that differ in ratio alone: within it, more ratio is more quality."""
    return dataclasses.replace(selection, ratio=1.0)


def describe_selection(selection: Selection) -> str:
    """`hkvd r=0.15 @1`: selector, ratio, check layer, and what else is set."""
    text = f"{selection.selector.value} r={selection.ratio:g} @{selection.check_layer}"
    if selection.query_layers:
        text += f" q={','.join(map(str, selection.query_layers))}"
    return text if selection.adaptive_mass is None else f"{text} mass={selection.adaptive_mass:g}"


@dataclass(frozen=True)
class Noise:
    """Full prefill against full prefill in other company: what no blend can be better than."""

    __pydantic_config__ = STRICT

    kl_mean: float
    """Nats."""
    kl_p99: float
    top1_agreement: float


@dataclass(frozen=True)
class ReportEntry:
    """One configuration against full prefill, over the same prompts."""

    __pydantic_config__ = STRICT

    selection: Selection
    cost: float
    """Mean share of a full prefill's token-layers, extra passes included."""
    kl_mean: float
    """Nats, full prefill's distribution against the blend's, teacher-forced, over all answer positions."""
    kl_p99: float
    top1_agreement: float
    num_prompts: int
    num_positions: int
    accuracy: float | None = None
    """Share of prompts answered right; None where the questions have no answers."""
    accuracy_full: float | None = None
    """Full prefill's accuracy on the same prompts."""

    def __post_init__(self) -> None:
        values = [self.cost, self.kl_mean, self.kl_p99, self.top1_agreement]
        values += [value for value in (self.accuracy, self.accuracy_full) if value is not None]
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise InvalidField(
                "entry", f"{describe_selection(self.selection)} has a measurement that is no finite share"
            )
        if self.num_prompts < 1 or self.num_positions < 1:
            raise InvalidField("entry", f"{describe_selection(self.selection)} was measured on nothing")


@dataclass(frozen=True)
class Thresholds:
    """What a configuration must reach."""

    __pydantic_config__ = STRICT

    kl_mean_max: float = 0.1
    """Nats, or twice the noise floor where that is higher."""
    kl_p99_max: float = 5.0
    """Nats. One answer in a hundred may be another one; more would show in the agreement."""
    top1_agreement_min: float = 0.95
    accuracy_share_min: float = 0.97
    """Share of full prefill's accuracy that a blend must reach. The paper's own loss is 0.02 F1."""
    prompts_min: int = 32
    """Entries of fewer prompts were only screened: they neither pass nor fail."""

    def __post_init__(self) -> None:
        for name in ("top1_agreement_min", "accuracy_share_min"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidField(f"thresholds.{name}", f"{getattr(self, name)} is outside [0, 1]")
        for name in ("kl_mean_max", "kl_p99_max"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidField(f"thresholds.{name}", f"{getattr(self, name)} must be above 0")
        if self.prompts_min < 1:
            raise InvalidField("thresholds.prompts_min", f"{self.prompts_min} must be at least 1")


@dataclass(frozen=True)
class Choice:
    """What follows from the measurements."""

    __pydantic_config__ = STRICT

    selection: Selection | None
    """The cheapest one that passes; None: do not blend this model."""
    why: str
    limits: dict[str, Selection] = field(default_factory=dict)
    """By selector name, its layers and the least ratio that passed; one that is missing passed nowhere."""


@dataclass(frozen=True)
class Tripped:
    """Blending was turned off by what shadowing saw."""

    __pydantic_config__ = STRICT

    reason: str
    at: str
    """ISO 8601, UTC."""


@dataclass(frozen=True)
class CalibrationReport:
    __pydantic_config__ = STRICT

    binding: Binding
    created: str
    """ISO 8601, UTC. Identifies the calibration among those of its binding: the latest one counts."""
    questions: str
    """Where the prompts came from."""
    seed: int
    noise: Noise
    thresholds: Thresholds
    entries: list[ReportEntry]
    choice: Choice
    tripped: Tripped | None = None
    version: int = REPORT_VERSION
    baseline: Baseline | None = None
    """What shadowing compares with; None in reports that were made without one."""

    @staticmethod
    def of(
        binding: Binding,
        created: str,
        questions: str,
        seed: int,
        noise: Noise,
        thresholds: Thresholds,
        entries: Sequence[ReportEntry],
    ) -> CalibrationReport:
        """The report of these measurements."""
        choice = choose(entries, noise, thresholds)
        return CalibrationReport(binding, created, questions, seed, noise, thresholds, list(entries), choice)

    @property
    def digest(self) -> str:
        """Over the canonical JSON of every other field."""
        return _digest(self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        """A report without a baseline has no such field: builds that know none can read it."""
        fields = dataclasses.asdict(self)
        if self.baseline is None:
            del fields["baseline"]
        return fields

    def to_bytes(self) -> bytes:
        document = {**self._fields, "digest": self.digest}
        return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()

    @staticmethod
    def from_bytes(document: bytes) -> CalibrationReport:
        """Raises `Corrupted` for what is no report or was edited, `VersionMismatch` for another format."""
        values = _parse_report(document)
        if values.get("version") != REPORT_VERSION:
            raise VersionMismatch(
                f"a calibration report of format {values.get('version')!r}; this build reads "
                f"{REPORT_VERSION}: calibrate again"
            )
        if values.pop("digest", None) != _digest(values):
            raise Corrupted("the calibration report does not match its digest; calibrate again")
        try:
            report = load(CalibrationReport, values, "report")
        except InvalidField as error:
            raise Corrupted(f"the calibration report is not one: {error}; calibrate again") from None
        if choose(report.entries, report.noise, report.thresholds) != report.choice:
            raise Corrupted("the calibration report's choice does not follow from it; calibrate again")
        return report

    def as_tripped(self, reason: str, at: str) -> CalibrationReport:
        """The revision that turns blending off until somebody calibrates again."""
        return dataclasses.replace(self, tripped=Tripped(reason, at))

    def created_after(self, document: bytes) -> CalibrationReport:
        """This calibration, with `created` moved past that of a stored document if a clock was behind."""
        latest = ReportRevision.of(document).created
        if _moment(self.created) > latest:
            return self
        return dataclasses.replace(self, created=(latest + _STEP).isoformat(timespec="seconds"))


@dataclass(frozen=True, order=True)
class ReportRevision:
    """How recent a stored document is. A total order, the same for every reader of the same bytes.

    Every field is one that reports always had: a counter of its own would be an unknown field to builds that
    do not know it, and they would refuse the report.
    """

    created: datetime
    """A new calibration is above all older ones, tripped or not."""
    is_tripped: bool
    """Between two documents of one calibration, the tripped report is above the one that allows blending."""
    digest: str
    """Decides between two trips of one calibration."""

    @staticmethod
    def of(document: bytes) -> ReportRevision:
        """The lowest one for a document that is no report or was edited. Never raises.

        Checks the digest alone, so that reports with fields of later builds are ordered too, and so that a
        store does not spend time on the measurements of a hostile one.
        """
        try:
            values = _parse_report(document)
            digest = values.pop("digest", None)
            if digest != _digest(values):
                return ReportRevision(_OLDEST, False, "")
        except (Corrupted, RecursionError):
            return ReportRevision(_OLDEST, False, "")
        return ReportRevision(_moment(values.get("created")), values.get("tripped") is not None, digest)


def supersedes(document: bytes, other: bytes | None) -> bool:
    """Whether a stored report must be kept rather than another one; None: there is no other one. Pure.

    False both ways for two documents that are no reports: whichever is written last replaces the other.
    """
    if other is None:
        return True
    return document != other and ReportRevision.of(document) > ReportRevision.of(other)


def _moment(created: object) -> datetime:
    """The time that `created` says; `_OLDEST` where it says none, or none that another one could follow."""
    try:
        moment = datetime.fromisoformat(created)  # type: ignore[arg-type]
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return _OLDEST
    return moment if moment <= _LATEST else _OLDEST


def _parse_report(document: bytes) -> dict[str, Any]:
    """The JSON object that a document holds, unchecked. Raises `Corrupted`."""
    if len(document) > REPORT_BYTES_MAX:
        raise Corrupted(f"a report of {len(document)} bytes; at most {REPORT_BYTES_MAX} are read")
    try:
        values = json.loads(document)
    except (ValueError, RecursionError):
        raise Corrupted("the calibration report is not JSON; calibrate again") from None
    if not isinstance(values, dict):
        raise Corrupted("the calibration report is not a JSON object; calibrate again")
    return values


def _digest(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return blake3.blake3(b"kintsugi-report\0" + canonical.encode()).hexdigest()


def seal_document(fields: dict[str, Any]) -> bytes:
    """A small document that a store orders by `created` as it does reports (`ReportRevision`)."""
    sealed = {**fields, "digest": _digest(fields)}
    return json.dumps(sealed, separators=(",", ":"), allow_nan=False).encode()


def open_document(document: bytes) -> dict[str, Any]:
    """The fields of a document from `seal_document`. Raises `Corrupted`."""
    fields = _parse_report(document)
    if fields.pop("digest", None) != _digest(fields):
        raise Corrupted("the document does not match its digest")
    return fields


def shortfalls(entry: ReportEntry, noise: Noise, thresholds: Thresholds) -> list[str]:
    """What an entry misses, in words; empty where it passes.

    Nobody is asked for more than full prefill gives against itself.
    """
    missed = []
    if entry.num_prompts < thresholds.prompts_min:
        missed.append(f"{entry.num_prompts} prompts, fewer than {thresholds.prompts_min}")
    for name, value, bar in (
        ("KL mean", entry.kl_mean, max(thresholds.kl_mean_max, 2 * noise.kl_mean)),
        ("KL p99", entry.kl_p99, max(thresholds.kl_p99_max, 2 * noise.kl_p99)),
    ):
        if value > bar:
            missed.append(f"{name} {value:.3g} above {bar:.3g}")
    agreement = min(thresholds.top1_agreement_min, noise.top1_agreement)
    if entry.top1_agreement < agreement:
        missed.append(f"top-1 agreement {entry.top1_agreement:.3f} below {agreement:.3f}")
    if entry.accuracy is not None and entry.accuracy_full is not None:
        bar = thresholds.accuracy_share_min * entry.accuracy_full
        if entry.accuracy < bar - RATIO_TOLERANCE:
            missed.append(f"accuracy {entry.accuracy:.3f} below {bar:.3f}")
    return missed


def choose(entries: Sequence[ReportEntry], noise: Noise, thresholds: Thresholds) -> Choice:
    """The cheapest configuration that passes, and each selector's least ratio. Pure.

    A configuration is eligible where it passes and so does every larger ratio of its family that was
    measured in full: one lucky point below two that fail is luck. One that costs a full prefill or more is
    none. Ties go to the smaller KL, then to the name, so that the same measurements decide alike.
    """
    measured = [entry for entry in entries if entry.num_prompts >= thresholds.prompts_min]
    failing = [entry.selection for entry in measured if shortfalls(entry, noise, thresholds)]
    eligible = [
        entry
        for entry in measured
        if entry.cost < 1.0 and not any(_undermines(bad, entry.selection) for bad in failing)
    ]
    if not eligible:
        return Choice(None, _why_none(entries, noise, thresholds))
    eligible.sort(key=lambda entry: (entry.cost, entry.kl_mean, describe_selection(entry.selection)))
    limits: dict[str, Selection] = {}
    for entry in eligible:
        limits.setdefault(entry.selection.selector.value, _least(entry.selection, eligible))
    best = eligible[0]
    why = f"cheapest of {len(eligible)} that pass, of {len(measured)} measured: cost {best.cost:.3f}"
    return Choice(best.selection, why, limits)


def _undermines(failing: Selection, selection: Selection) -> bool:
    """Whether a failure at a ratio no smaller says that passing was luck. Its own failure does, too."""
    return family(failing) == family(selection) and failing.ratio >= selection.ratio


def _least(of: Selection, eligible: Sequence[ReportEntry]) -> Selection:
    ratios = [entry.selection.ratio for entry in eligible if family(entry.selection) == family(of)]
    return dataclasses.replace(of, ratio=min(ratios))


def _why_none(entries: Sequence[ReportEntry], noise: Noise, thresholds: Thresholds) -> str:
    """The configuration that misses least, and what it misses."""
    if not entries:
        return "nothing was measured"
    nearest = min(
        entries,
        key=lambda entry: (len(shortfalls(entry, noise, thresholds)), -entry.top1_agreement, entry.kl_mean),
    )
    missed = shortfalls(nearest, noise, thresholds) or [f"cost {nearest.cost:.3f}, or a larger ratio fails"]
    name = describe_selection(nearest.selection)
    return f"none of {len(entries)} passes; nearest is {name}: {'; '.join(missed)}"

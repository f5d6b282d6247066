"""The calibration report of one model, and the decision whether the model may be blended.

Blending is an approximation, and how good it is depends on the model. A `CalibrationReport` holds what was
measured against full prefill, confidence bounds, thresholds, and what follows from them; `choose` is the
whole decision. A report belongs to one `Binding`: it does not apply to another model, prefix, codec or engine
version. It applies to one `Domain`: the prompt form and the lengths that were measured. It carries a digest
over its canonical JSON, so that a hand-edited report is rejected. The digest is not a signature: anyone who
can write to the store can write a report.

Several copies of a report are stored, and several processes write it. `supersedes` says which copy counts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

import blake3

from kintsugi.core.baseline import Baseline
from kintsugi.core.errors import Corrupted, InvalidField, VersionMismatch
from kintsugi.core.plan import Selection
from kintsugi.core.prompt import Domain
from kintsugi.core.schema import STRICT, load
from kintsugi.core.spaces import ModelFingerprint, token_bytes

REPORT_VERSION = 2
REPORT_BYTES_MAX = 1 << 20
"""Maximum size of a document in a store; a larger one is not even parsed."""

RATIO_TOLERANCE = 1e-9
LOSS_TOLERANCE = 1e-6
"""Bounds are kept to six digits."""
FIRST_SHARE = 0.5
"""Share of the total error probability that the first, safest configuration of a sequence gets."""
HIGHEST_LOSS = 0.5
"""Cap of every threshold, however noisy full prefill is: a blend that loses more is not a blend."""

FUTURE_MAX = timedelta(days=1)
"""How far ahead of a store's clock a new report may be dated, because clocks differ."""

_STEP = timedelta(seconds=1)
"""The resolution of `CalibrationReport.created`."""
_OLDEST = datetime.min.replace(tzinfo=UTC)
_LATEST = datetime.max.replace(tzinfo=UTC) - _STEP


@dataclass(frozen=True)
class Binding:
    """What a report applies to. Every field affects the KV that a blend produces."""

    __pydantic_config__ = STRICT

    fingerprint: str
    """The model's fingerprint, hexadecimal."""
    prefix: str
    """Digest of the tokens that chunks were prefilled after."""
    codec: str
    """Codec of the stored chunks."""
    vllm: str
    """Version of vLLM."""
    kintsugi: str
    """Version of Kintsugi."""
    context: str = ""
    """Digest of the context between the prefix and each chunk; empty: none."""

    @staticmethod
    def of(
        fingerprint: ModelFingerprint,
        prefix_token_ids: Sequence[int],
        codec: str,
        vllm: str,
        kintsugi: str,
        context_token_ids: Sequence[int] = (),
    ) -> Binding:
        """Make a binding from token ids instead of their digests."""
        prefix = blake3.blake3(b"kintsugi-prefix\0" + token_bytes(prefix_token_ids)).hexdigest()[:32]
        context = blake3.blake3(b"kintsugi-context\0" + token_bytes(context_token_ids)).hexdigest()[:32]
        return Binding(
            fingerprint.hex, prefix, codec, vllm, kintsugi, context if len(context_token_ids) else ""
        )

    @property
    def model(self) -> ModelFingerprint:
        """The model's fingerprint."""
        return ModelFingerprint(bytes.fromhex(self.fingerprint))

    @property
    def report_name(self) -> str:
        """The name under which a store keeps the report. Engines of two versions keep two reports, so that
        upgrading one does not remove the other's report."""
        version = blake3.blake3(f"{self.vllm}\0{self.kintsugi}".encode()).hexdigest()[:16]
        context = f"/{self.context}" if self.context else ""
        return f"calibration/{self.codec}/{self.prefix}{context}/{version}"

    def difference(self, other: Binding) -> str | None:
        """Describe the first field that differs; None if none does."""
        for one in dataclasses.fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if mine != theirs:
                return f"{one.name} is {theirs[:16] or 'none'}, not {mine[:16] or 'none'}"
        return None


def describe_selection(selection: Selection) -> str:
    """`hkvd r=0.15 @1`: selector, ratio, check layer, and what else is set."""
    text = f"{selection.selector} r={selection.ratio:g} @{selection.check_layer}"
    if selection.query_layers:
        text += f" q={_describe_layers(selection.query_layers)}"
    return text if selection.adaptive_mass is None else f"{text} mass={selection.adaptive_mass:g}"


def _describe_layers(layers: Sequence[int]) -> str:
    """`0-7`, or `2,4` where layers are left out."""
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))


@dataclass(frozen=True)
class Noise:
    """Differences of full prefill from itself in other batches: no blend can be better."""

    __pydantic_config__ = STRICT

    kl_mean: float
    """Nats."""
    kl_p99: float
    top1_agreement: float


class Quantity(StrEnum):
    """A loss of a blend against full prefill: one number per prompt, at most 1, higher is worse."""

    KL = "kl"
    """Mean KL over the positions of full prefill's answer, in nats. A prompt counts as at most 1: a larger KL
    means another answer, which the other quantities measure."""
    DISAGREEMENT = "disagreement"
    """Share of these positions whose most likely token differs."""
    EXACT_MATCH = "exact_match"
    """Full prefill's exact match minus the blend's."""
    F1 = "f1"
    """Full prefill's F1 minus the blend's; Rouge-L for tasks that are scored by it."""


QUANTITY_NAMES = {
    Quantity.KL: "KL",
    Quantity.DISAGREEMENT: "top-1 disagreement",
    Quantity.EXACT_MATCH: "loss of exact match",
    Quantity.F1: "loss of F1",
}


@dataclass(frozen=True)
class LossBound:
    """One mean loss, and its confidence bound, which decides."""

    __pydantic_config__ = STRICT

    quantity: Quantity
    stratum: str
    """The kind of prompts: a task, or a range of lengths. Empty: all prompts."""
    mean: float
    upper: float
    """The true mean is below this; the entry's `error` is the probability that any of its bounds is wrong."""
    num_prompts: int


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
    exact_match: float | None = None
    """Share of prompts answered right; None where the questions have no answers."""
    exact_match_full: float | None = None
    """Full prefill's, on the same prompts."""
    f1: float | None = None
    f1_full: float | None = None
    place: int | None = None
    """Position in the sequence of confirmed configurations, from the safest to the cheapest. None: only
    screened, which neither passes nor fails."""
    error: float = 1.0
    """Probability that any of the bounds is wrong."""
    bounds: list[LossBound] = field(default_factory=list)
    """Bounds from the confirmation's prompts alone; empty if the entry was only screened."""
    prompts_missing: int | None = None
    """Approximate number of further prompts that would decide the entry; None if it is decided, or if more
    prompts like these would not help."""

    def __post_init__(self) -> None:
        values = [self.cost, self.kl_mean, self.kl_p99, self.top1_agreement]
        measured = (self.exact_match, self.exact_match_full, self.f1, self.f1_full)
        values += [value for value in measured if value is not None]
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise InvalidField(
                "entry", f"{describe_selection(self.selection)} has a measurement that is no finite share"
            )
        if self.num_prompts < 1 or self.num_positions < 1:
            raise InvalidField("entry", f"{describe_selection(self.selection)} was measured on nothing")
        if self.place is not None and not self.bounds:
            raise InvalidField("entry", f"{describe_selection(self.selection)} is confirmed without bounds")


@dataclass(frozen=True)
class Thresholds:
    """Limits on a configuration's confidence bounds."""

    __pydantic_config__ = STRICT

    kl_mean_max: float = 0.1
    """Nats, or twice the noise floor where that is higher. A prompt counts as at most 1 nat."""
    top1_agreement_min: float = 0.95
    """Full prefill's agreement with itself applies instead where that is lower."""
    exact_match_loss_max: float = 0.03
    """Share of prompts. The paper's own loss is 0.02 F1."""
    f1_loss_max: float = 0.03
    stratum_factor: float = 2.0
    """Factor on the thresholds of a single task, or of one half of the lengths: it has fewer prompts, and its
    loss must not be hidden by the others."""
    stratum_prompts_min: int = 50
    """Kinds of prompts with fewer questions are not judged on their own."""
    confidence: float = 0.95
    """Probability that no configuration passes whose true means exceed the thresholds, over all together."""
    prompts_min: int = 32
    """Minimum number of prompts for a calibration."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.top1_agreement_min <= 1.0:
            raise InvalidField(
                "thresholds.top1_agreement_min", f"{self.top1_agreement_min} is outside [0, 1]"
            )
        for name in ("kl_mean_max", "exact_match_loss_max", "f1_loss_max"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise InvalidField(f"thresholds.{name}", f"{getattr(self, name)} is outside (0, 1]")
        if not 0.0 < self.confidence < 1.0:
            raise InvalidField("thresholds.confidence", f"{self.confidence} is outside (0, 1)")
        if not (math.isfinite(self.stratum_factor) and self.stratum_factor >= 1.0):
            raise InvalidField("thresholds.stratum_factor", f"{self.stratum_factor} must be at least 1")
        for name in ("prompts_min", "stratum_prompts_min"):
            if getattr(self, name) < 1:
                raise InvalidField(f"thresholds.{name}", f"{getattr(self, name)} must be at least 1")

    def highest(self, quantity: Quantity, stratum: str, noise: Noise) -> float:
        """Return the highest mean loss that passes. No threshold is stricter than full prefill's loss against
        itself."""
        highest = {
            Quantity.KL: max(self.kl_mean_max, 2 * noise.kl_mean),
            Quantity.DISAGREEMENT: 1 - min(self.top1_agreement_min, noise.top1_agreement),
            Quantity.EXACT_MATCH: self.exact_match_loss_max,
            Quantity.F1: self.f1_loss_max,
        }[quantity]
        return min(HIGHEST_LOSS, highest * (self.stratum_factor if stratum else 1.0))


@dataclass(frozen=True)
class Search:
    """How the configurations were found."""

    __pydantic_config__ = STRICT

    candidates: int
    """Configurations that were tried."""
    confirmed: int
    """Number of these measured again, on separate prompts."""
    minutes: float
    more_minutes: float | None = None
    """Approximate further time for the undecided entries; None if none is undecided, or if more time would
    not help."""


@dataclass(frozen=True)
class Choice:
    """The decision that follows from the measurements."""

    __pydantic_config__ = STRICT

    selection: Selection | None
    """The cheapest selection that passes; None: do not blend this model."""
    why: str
    limits: dict[str, Selection] = field(default_factory=dict)
    """The cheapest passing configuration by selector name; a selector that is missing passed with none."""


@dataclass(frozen=True)
class Tripped:
    """Records that shadowing turned blending off."""

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
    domain: Domain
    search: Search
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
        domain: Domain,
        search: Search,
        entries: Sequence[ReportEntry],
    ) -> CalibrationReport:
        """The report of these measurements."""
        choice = choose(entries, noise, thresholds)
        return CalibrationReport(
            binding, created, questions, seed, noise, thresholds, domain, search, list(entries), choice
        )

    @property
    def digest(self) -> str:
        """Digest over the canonical JSON of every other field."""
        return _digest(self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        """Every field as JSON. An empty context and an empty baseline are left out, so that builds without
        these fields can read the report."""
        fields = dataclasses.asdict(self)
        if not self.binding.context:
            del fields["binding"]["context"]
        if self.baseline is None:
            del fields["baseline"]
        return fields

    def to_bytes(self) -> bytes:
        document = {**self._fields, "digest": self.digest}
        return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()

    @staticmethod
    def from_bytes(document: bytes) -> CalibrationReport:
        """Parse a report. Raises `Corrupted` if it is invalid or edited, `VersionMismatch` for another
        format."""
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
        """Return the revision that turns blending off until the next calibration."""
        return dataclasses.replace(self, tripped=Tripped(reason, at))

    def created_after(self, document: bytes) -> CalibrationReport:
        """Return this calibration, with `created` moved after that of a stored document if a clock was
        slow."""
        latest = ReportRevision.of(document).created
        if _moment(self.created) > latest:
            return self
        return dataclasses.replace(self, created=(latest + _STEP).isoformat(timespec="seconds"))


@dataclass(frozen=True, order=True)
class ReportRevision:
    """The revision of a stored document. A total order, the same for every reader of the same bytes.

    It uses only fields that every report has: builds that do not know an added counter would reject the
    report.
    """

    created: datetime
    """A new calibration is above all older ones, tripped or not."""
    is_tripped: bool
    """Between two documents of one calibration, the tripped report is above the one that allows blending."""
    digest: str
    """Decides between two trips of one calibration."""

    @staticmethod
    def of(document: bytes) -> ReportRevision:
        """Return a document's revision; the lowest for an invalid or edited document. Never raises.

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

    False both ways for two invalid documents: the one written last replaces the other.
    """
    if other is None:
        return True
    return document != other and ReportRevision.of(document) > ReportRevision.of(other)


def replaces(document: bytes, held: bytes | None, now: datetime) -> bool:
    """Whether a store keeps a report in place of the one that it holds, if any. Pure.

    Raises `InvalidField` for a report dated in the future, which would supersede later calibrations. A
    tripped one is accepted, because turning blending off must always be possible; the next report that is put
    replaces it.
    """
    latest = now + FUTURE_MAX
    revision = ReportRevision.of(document)
    if revision.created > latest and not revision.is_tripped:
        raise InvalidField(
            "created",
            f"{revision.created.isoformat()} is more than a day ahead of the store's clock "
            f"({now.isoformat(timespec='seconds')}); set the clock that is wrong, and calibrate again",
        )
    if held is None or ReportRevision.of(held).created > latest:
        return True
    return not supersedes(held, document)


def _moment(created: object) -> datetime:
    """Parse `created`; `_OLDEST` if it is invalid, or too late for another time to follow."""
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
    """Describe why an entry does not pass; empty if every bound is within its threshold."""
    if entry.place is None:
        return ["only screened"]
    missed = []
    for bound in entry.bounds:
        highest = thresholds.highest(bound.quantity, bound.stratum, noise)
        if bound.upper > highest + LOSS_TOLERANCE:
            where = f" of {bound.stratum}" if bound.stratum else ""
            name = QUANTITY_NAMES[bound.quantity]
            missed.append(
                f"{name}{where}: {bound.mean:.3f} in {bound.num_prompts} prompts, "
                f"so up to {bound.upper:.3f}; at most {highest:.3g} passes"
            )
    return missed


def passing(entries: Sequence[ReportEntry], noise: Noise, thresholds: Thresholds) -> list[ReportEntry]:
    """The confirmed entries that pass, from the safest to the cheapest. Pure.

    An entry passes if every bound is within its threshold and was computed with no more error than the entry
    was entitled to (`entitlements`).
    """
    confirmed = sorted((e for e in entries if e.place is not None), key=lambda entry: entry.place or 0)
    within = [not shortfalls(entry, noise, thresholds) for entry in confirmed]
    passed: list[ReportEntry] = []
    for index, entry in enumerate(confirmed):
        entitled = entitlements(within[:index], len(confirmed), thresholds)[-1]
        within[index] = within[index] and entry.error <= entitled * (1 + RATIO_TOLERANCE)
        if within[index]:
            passed.append(entry)
    return passed


def entitlements(passed: Sequence[bool], count: int, thresholds: Thresholds) -> list[float]:
    """Return the error probability that each configuration of a sequence of `count` may use, up to the one
    after `passed`.

    The first gets `FIRST_SHARE` of the total, the others share the rest, and one that passes hands its share
    to the next (the fallback procedure: Wiens and Dmitrienko, 2005). So the probability that a wrong
    configuration passes stays within ``1 - confidence``.
    """
    whole = 1 - thresholds.confidence
    rest = (1 - FIRST_SHARE) * whole / max(1, count - 1)
    found = [FIRST_SHARE * whole if count > 1 else whole]
    for has_passed in passed:
        found.append(rest + (found[-1] if has_passed else 0.0))
    return found


def choose(entries: Sequence[ReportEntry], noise: Noise, thresholds: Thresholds) -> Choice:
    """The cheapest configuration that passes, and each selector's cheapest. Pure.

    Only configurations that passed count: a larger ratio or a deeper layer is not assumed to be better. One
    that costs a full prefill or more is excluded. Ties go to the smaller KL, then to the name, so that the
    same measurements decide alike.
    """
    eligible = [entry for entry in passing(entries, noise, thresholds) if entry.cost < 1.0]
    if not eligible:
        return Choice(None, _why_none(entries, noise, thresholds))
    eligible.sort(key=lambda entry: (entry.cost, entry.kl_mean, describe_selection(entry.selection)))
    limits: dict[str, Selection] = {}
    for entry in eligible:
        limits.setdefault(entry.selection.selector, entry.selection)
    confirmed = sum(entry.place is not None for entry in entries)
    best = eligible[0]
    why = f"cheapest of {len(eligible)} that pass, of {confirmed} confirmed: cost {best.cost:.3f}"
    return Choice(best.selection, why, limits)


def _why_none(entries: Sequence[ReportEntry], noise: Noise, thresholds: Thresholds) -> str:
    """Describe the configuration that is closest to passing, and what it misses."""
    confirmed = [entry for entry in entries if entry.place is not None]
    if not confirmed:
        return f"none of {len(entries)} looked good enough to confirm" if entries else "nothing was measured"
    nearest = min(confirmed, key=lambda entry: (len(shortfalls(entry, noise, thresholds)), entry.place))
    missed = shortfalls(nearest, noise, thresholds) or [f"cost {nearest.cost:.3f}"]
    more = nearest.prompts_missing
    hint = "" if more is None else f"; undecided: about {more} more prompts like these would decide it"
    name = describe_selection(nearest.selection)
    return f"none of {len(confirmed)} confirmed passes; nearest is {name}: {'; '.join(missed[:3])}{hint}"

"""The report: everything that is known about the blends of one model, and which of them may serve. Pure.

Evidence comes from pairs (`core.evidence`) that engines measured on the prompts they serve, or that `kintsugi
calibrate` measured on a file. It is kept by cell (the kind and length of the prompts) and by source (a
namespace, or the file). A configuration passes in a cell for a source once its evidence shows that its mean
loss is below the limit of the chosen `Quality`.

Error probability: all tests of a report together pass a configuration that is beyond the limit with a
probability of at most `ERROR`, over the report's whole life. Every pair of cell and source gets a slot with
its share (`share_of_slot`). Within a slot, configurations are tested in the fixed order of the ladder, from
the safest to the cheapest, and a configuration can pass only after all earlier ones, so they need not share
the probability. After a closing, the evidence of its slot starts anew with half of the remaining probability.

Several engines write one report. Each writes its own part, and tallies are sums, so parts are added and need
no order. A part that another engine overwrites is missing until its engine writes again: this may delay an
opening, but never causes one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import blake3
from pydantic import Field

from kintsugi.core.documents import open_document, seal_document
from kintsugi.core.errors import Corrupted, InvalidField, VersionMismatch
from kintsugi.core.evidence import EMPTY, Levels, Quality, Tally, size_of
from kintsugi.core.namespaces import base_of
from kintsugi.core.plan import Selection
from kintsugi.core.request import SelectorName
from kintsugi.core.schema import STRICT, load
from kintsugi.core.spaces import ModelFingerprint, token_bytes

REPORT_VERSION = 3
ALGORITHM = 1
"""Number of the algorithm that computes blended KV. It is raised by hand when blended KV can change; reports
of another number do not apply."""
ERROR = 0.025
FIRST_SLOT = 0.85
"""Share of the error probability of the first slot: most services have one kind of prompts and one tenant."""
FIRST_EPOCH = 0.9
"""Share of a slot's error probability that is used before its first closing."""
SOURCES_KEPT_MAX = 1024
"""Maximum number of results, by cell and source, that a report and a gate's state cache: half a megabyte. A
caller may make up any number of namespaces."""
COMMON_SHARE = 0.08
"""Share of the error probability for passing in a cell on the evidence of several namespaces together."""
NAMESPACES_MIN = 4
"""Minimum number of namespaces whose evidence opens a cell for others: no namespace supplies more than its
share."""
CLOSED_TOGETHER = 2
"""Number of namespaces whose closings close a cell for all."""
FILE = "file"
"""The source of pairs that an operator measured on a file. They count for every namespace."""
BANDS = (512, 2048, 8192, 32_768)
"""Upper bounds of the lengths of prompts, in tokens, of all bands but the last."""
SIZE_PAIRS_MIN = 8
"""Minimum number of measured pairs whose chunks are similar to a prompt's, for the prompt to be blended."""
PARTS_MAX = 8
"""Maximum number of parts. The oldest are added together."""
ENTRIES_MAX = 256
"""Maximum number of entries of a part. When it is reached, nothing new is measured."""
CLOSINGS_MAX = 256
CLOSINGS_EACH = 8
"""Closings of one source after which it stays closed: no error probability is left to share, and one tenant's
closings must not displace those of others."""
LATEST_MAX = 128
FOLDED_MAX = 1024
FOLDED = "folded"
"""Writer of parts that were added together."""
PROBATION_PAIRS = 32
"""Pairs that an engine with other versions measures before it trusts the evidence of earlier ones."""
LADDER = tuple(Selection(ratio, SelectorName.QUERY) for ratio in (0.75, 0.4, 0.2, 0.1))
"""The configurations to try, from the safest to the cheapest. On the models that were measured, no other
selector loses less at the same cost; a service may configure one of another distribution in its place. This
only sets the order of the tests; evidence decides what passes."""


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
    context: str = ""
    """Digest of the context between the prefix and each chunk; empty: none."""
    algorithm: int = ALGORITHM
    selector: str = SelectorName.QUERY
    """Selector of the configurations that are tested."""

    @staticmethod
    def of(
        fingerprint: ModelFingerprint,
        prefix_token_ids: Sequence[int],
        codec: str,
        context_token_ids: Sequence[int] = (),
        selector: str = SelectorName.QUERY,
    ) -> Binding:
        """Make a binding from token ids instead of their digests."""
        prefix = blake3.blake3(b"kintsugi-prefix\0" + token_bytes(prefix_token_ids)).hexdigest()[:32]
        context = blake3.blake3(b"kintsugi-context\0" + token_bytes(context_token_ids)).hexdigest()[:32]
        context = context if len(context_token_ids) else ""
        return Binding(fingerprint.hex, prefix, codec, context, selector=str(selector))

    @property
    def model(self) -> ModelFingerprint:
        """The model's fingerprint."""
        return ModelFingerprint(bytes.fromhex(self.fingerprint))

    @property
    def report_name(self) -> str:
        """The name under which a store keeps the report."""
        context = f"/{self.context}" if self.context else ""
        other = blake3.blake3(self.selector.encode()).hexdigest()[:16]
        selector = "" if self.selector == SelectorName.QUERY else f"/{other}"
        return f"quality/{self.codec}/{self.prefix}{context}/{self.algorithm}{selector}"

    @property
    def ladder(self) -> tuple[Selection, ...]:
        """`Report.ladder` of a new report."""
        return tuple(dataclasses.replace(one, selector=self.selector) for one in LADDER)

    def difference(self, other: Binding) -> str | None:
        """Describe the first field that differs; None if none does."""
        for one in dataclasses.fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if mine != theirs:
                return f"{one.name} is {str(theirs)[:16] or 'none'}, not {str(mine)[:16] or 'none'}"
        return None


def describe_selection(selection: Selection) -> str:
    """`hkvd r=0.15 @1`: selector, ratio, check layer, and query layers if set."""
    text = f"{selection.selector} r={selection.ratio:g} @{selection.check_layer}"
    return f"{text} q={_describe_layers(selection.query_layers)}" if selection.query_layers else text


def _describe_layers(layers: Sequence[int]) -> str:
    """`0-7`, or `2,4` where layers are left out."""
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))


@dataclass(frozen=True, order=True)
class Cell:
    """A kind of prompts that is judged on its own."""

    __pydantic_config__ = STRICT

    kind: Literal["declared", "discovered"]
    """`declared`: a client named the chunks; `discovered`: they were found in the prompt."""
    band: Annotated[int, Field(ge=0, le=len(BANDS))]
    """Index of the prompt's length in `BANDS`."""

    @staticmethod
    def of(is_discovered: bool, num_tokens: int) -> Cell:
        """The cell of a prompt of ``num_tokens``."""
        return Cell("discovered" if is_discovered else "declared", sum(num_tokens > one for one in BANDS))

    def __str__(self) -> str:
        low = BANDS[self.band - 1] + 1 if self.band else 1
        end = f" to {BANDS[self.band]}" if self.band < len(BANDS) else " or more"
        found = "discovered chunks" if self.kind == "discovered" else "declared chunks"
        return f"prompts of {low}{end} tokens with {found}"


@dataclass(frozen=True)
class ReportEntry:
    """The evidence of one engine about one configuration."""

    __pydantic_config__ = STRICT

    cell: Cell
    source: Annotated[str, Field(min_length=1, max_length=32)]
    """`source_of` a namespace, or `FILE`."""
    slot: Annotated[int, Field(ge=1)]
    """Position of cell and source among all that were measured, from 1."""
    epoch: Annotated[int, Field(ge=0)]
    """Number of closings before these pairs."""
    selection: Selection
    tally: Tally


@dataclass(frozen=True)
class Closing:
    """Records that blending was turned off because answers or stored chunks were found wrong."""

    __pydantic_config__ = STRICT

    reason: str
    at: str
    """ISO 8601, UTC."""
    source: str = ""
    """Empty: all sources."""


@dataclass(frozen=True)
class Opening:
    """Records when a configuration first passed."""

    __pydantic_config__ = STRICT

    cell: Cell
    source: str
    """Empty: for all namespaces."""
    selection: Selection
    at: str
    """ISO 8601, UTC."""


@dataclass(frozen=True)
class ServedBlend:
    """A blend that was served and compared, for the trip test of its source."""

    __pydantic_config__ = STRICT

    source: str
    levels: tuple[float, float, float]
    """`Levels` of the pair."""
    limits: tuple[float, float, float]
    """Their limits when the pair was measured."""

    @staticmethod
    def of(source: str, levels: Levels, limits: Levels) -> ServedBlend:
        rounded = [Levels(*(round(one, 6) for one in some)) for some in (levels, limits)]
        return ServedBlend(source, *rounded)


@dataclass(frozen=True)
class ReportPart:
    """What one engine contributed."""

    __pydantic_config__ = STRICT

    writer: Annotated[str, Field(min_length=1, max_length=64)]
    """An id that differs between engines and between starts."""
    versions: str
    """Versions of Kintsugi and vLLM, and the device."""
    at: str
    """When it was last changed: ISO 8601, UTC."""
    entries: Annotated[tuple[ReportEntry, ...], Field(max_length=ENTRIES_MAX)] = ()
    closings: Annotated[tuple[Closing, ...], Field(max_length=CLOSINGS_MAX)] = ()
    openings: Annotated[tuple[Opening, ...], Field(max_length=ENTRIES_MAX)] = ()
    latest: Annotated[tuple[ServedBlend, ...], Field(max_length=LATEST_MAX)] = ()
    """The latest pairs whose blends were served."""
    served: int = 0
    """Number of such pairs so far."""
    folded: Annotated[tuple[str, ...], Field(max_length=FOLDED_MAX)] = ()
    """Writers whose parts were added to this one."""


@dataclass(frozen=True)
class Allowance:
    """What passed for one source in one cell."""

    selections: tuple[Selection, ...]
    """From the safest to the cheapest; not empty."""
    tally: Tally
    """The evidence of the cheapest."""
    on_probation: bool = False
    """Whether engines with these versions have yet to confirm the evidence."""

    @property
    def cheapest(self) -> Selection:
        return self.selections[-1]

    def lacks(self, chunk_tokens: Sequence[int]) -> str | None:
        """Describe how a prompt's chunks differ from those that were measured; None if they do not."""
        mean = sum(chunk_tokens) / max(1, len(chunk_tokens))
        size, sizes = size_of(mean), dict(self.tally.sizes)
        if sum(sizes.get(size + step, 0) for step in (-1, 0, 1)) < SIZE_PAIRS_MIN:
            return f"chunks of about {mean:.0f} tokens were hardly measured yet"
        count, counts = size_of(len(chunk_tokens)), dict(self.tally.chunks)
        if sum(pairs for at, pairs in counts.items() if at >= count - 1) < SIZE_PAIRS_MIN:
            return f"prompts with {len(chunk_tokens)} chunks were hardly measured yet"
        return None


@dataclass(frozen=True)
class Standing:
    """The progress of the evidence of one source in one cell."""

    passed: tuple[Selection, ...]
    next: Selection | None
    """The configuration to test next; None: all passed."""
    tally: Tally
    """The evidence about `next`, or about the last configuration if all passed."""
    missing: int | None
    """Estimated number of pairs until `next` passes; None if more pairs like these do not help."""


@dataclass(frozen=True)
class Report:
    """The evidence of all engines with one binding."""

    __pydantic_config__ = STRICT

    binding: Binding
    created: str
    """When it was last written: ISO 8601, UTC. It orders the copies on different shards."""
    parts: Annotated[tuple[ReportPart, ...], Field(max_length=PARTS_MAX)] = ()
    ladder: Annotated[tuple[Selection, ...], Field(min_length=1, max_length=16)] = LADDER
    version: int = REPORT_VERSION

    def to_bytes(self) -> bytes:
        return seal_document(dataclasses.asdict(self))

    @staticmethod
    def from_bytes(document: bytes) -> Report:
        """Parse a report. Raises `Corrupted` if it is invalid or edited, `VersionMismatch` for another
        format."""
        values = open_document(document)
        if values.get("version") != REPORT_VERSION:
            raise VersionMismatch(
                f"a report of format {values.get('version')!r}; this build reads {REPORT_VERSION}"
            )
        try:
            return load(Report, values, "report")
        except InvalidField as error:
            raise Corrupted(f"the report is invalid: {error}") from None

    @cached_property
    def closings(self) -> tuple[Closing, ...]:
        """All closings, oldest first."""
        return tuple(sorted((one for part in self.parts for one in part.closings), key=lambda one: one.at))

    @cached_property
    def _closed(self) -> Counter[str]:
        """Number of closings by source; the empty source has the closings of all sources."""
        return Counter(one.source for one in self.closings)

    def epoch(self, source: str) -> int:
        """Return how often blending was closed for a source. Closings of `CLOSED_TOGETHER` other namespaces
        count as one for all."""
        others = len(self._closed.keys() - {"", source})
        return self._closed[""] + self._closed[source] + others // CLOSED_TOGETHER

    def last_closing(self, source: str) -> Closing | None:
        """Return the last closing that counts for a source; None if blending was never closed for it."""
        if not self.epoch(source):
            return None
        covering = [one for one in self.closings if one.source in ("", source)]
        return (covering or self.closings)[-1]

    @cached_property
    def _tallies(self) -> dict[tuple[Cell, str, Selection], Tally]:
        """The evidence of all parts since the last closing."""
        found: dict[tuple[Cell, str, Selection], Tally] = {}
        for entry in (entry for part in self.parts for entry in part.entries):
            if entry.epoch == self.epoch(entry.source):
                key = entry.cell, entry.source, entry.selection
                found[key] = found.get(key, EMPTY) + entry.tally
        return found

    def tally(self, cell: Cell, source: str, selection: Selection) -> Tally:
        """Return the evidence about a configuration since the last closing."""
        return self._tallies.get((cell, source, selection), EMPTY)

    @cached_property
    def _slots(self) -> dict[tuple[Cell, str], int]:
        """The slots of all cells and sources; no two are equal. Where two writers have taken one slot at the
        same time, one of the two moves to the next free slot. Where writers disagree, the highest counts: the
        share of the error probability never grows."""
        wanted: dict[tuple[Cell, str], int] = {}
        for entry in (entry for part in self.parts for entry in part.entries):
            key = entry.cell, entry.source
            wanted[key] = max(wanted.get(key, 1), entry.slot)
        found: dict[tuple[Cell, str], int] = {}
        last = 0
        for slot, key in sorted((slot, key) for key, slot in wanted.items()):
            found[key] = last = max(slot, last + 1)
        return found

    def slot(self, cell: Cell, source: str) -> int:
        """Return the slot of cell and source: the next free one if they have none."""
        return self._slots.get((cell, source), max(self._slots.values(), default=0) + 1)

    @property
    def cells(self) -> list[Cell]:
        return sorted({cell for cell, _ in self._slots})

    def sources(self, cell: Cell) -> list[str]:
        """Return the sources with evidence in a cell."""
        return sorted(source for one, source in self._slots if one == cell)

    @cached_property
    def standing(self) -> Callable[[Cell, str, Quality], Standing]:
        """Returns the progress of a source's own evidence in a cell. Cached, because every request needs it
        while nothing is open."""
        return lru_cache(SOURCES_KEPT_MAX)(self._compute_standing)

    def _compute_standing(self, cell: Cell, source: str, quality: Quality) -> Standing:
        epoch, slot = self.epoch(source), self.slot(cell, source)
        enough = -math.log(ERROR * (1 - COMMON_SHARE) * share_of_slot(slot) * _share_of_epoch(epoch))
        passed: list[Selection] = []
        tally = EMPTY
        for selection in self.ladder:
            tally = self.tally(cell, source, selection)
            if tally.log_wealth(quality) < enough:
                return Standing(tuple(passed), selection, tally, tally.pairs_missing(quality, enough))
            passed.append(selection)
        return Standing(tuple(passed), None, tally, 0)

    def common(self, cell: Cell, quality: Quality) -> tuple[tuple[Selection, ...], Tally]:
        """Return what passes in a cell on the evidence of several namespaces together, and the evidence about
        the cheapest configuration. Each namespace contributes at most its share of the wealth."""
        spaces = [source for source in self.sources(cell) if source != FILE]
        slot = min((self._slots[cell, source] for source in spaces), default=1)
        # Each closing restarts the evidence of its namespace, and therefore this test.
        epoch = sum(self.epoch(source) for source in spaces)
        enough = -math.log(ERROR * COMMON_SHARE * share_of_slot(slot) * _share_of_epoch(epoch))
        passed: list[Selection] = []
        last = EMPTY
        for selection in self.ladder:
            tallies = [self.tally(cell, source, selection) for source in spaces]
            wealths = [min(one.log_wealth(quality), enough / NAMESPACES_MIN) for one in tallies]
            if sum(wealths) < enough:
                break
            passed.append(selection)
            last = sum(tallies, EMPTY)
        return tuple(passed), last

    def allowance(self, cell: Cell, source: str, quality: Quality, versions: str) -> Allowance | None:
        """Return what a namespace's requests may use in a cell; None: nothing yet.

        A namespace in which blending was closed, alone or with all, needs new evidence of its own.
        """
        if self.epoch(source) >= CLOSINGS_EACH:
            return None
        found: list[tuple[tuple[Selection, ...], Tally]] = []
        for one in (source,) if self.epoch(source) else (source, FILE):
            passed = self.standing(cell, one, quality).passed
            found.append((passed, self.tally(cell, one, passed[-1]) if passed else EMPTY))
        if not self.epoch(source):
            found.append(self.common(cell, quality))
        selections, tally = max(found, key=lambda one: len(one[0]))
        if not selections:
            return None
        return Allowance(selections, tally, self.on_probation(versions))

    def on_probation(self, versions: str) -> bool:
        """Whether engines with these versions measured too few pairs to confirm what others measured."""
        pairs = sum(
            entry.tally.pairs for part in self.parts if part.versions == versions for entry in part.entries
        )
        return pairs < PROBATION_PAIRS

    def with_part(self, part: ReportPart, created: str) -> Report:
        """Return the report with a part in place of its writer's former one. If there are too many parts, the
        oldest are added together. A part that was added to another one is not added again: its writer
        continues under another id (`quality.reports`)."""
        parts = [one for one in self.parts if one.writer != part.writer]
        gone = {writer for one in parts for writer in one.folded}
        if part.writer in gone:
            return self
        parts = sorted((one for one in parts if one.writer not in gone), key=lambda one: one.at)
        while len(parts) >= PARTS_MAX:
            parts = [_fold(parts[0], parts[1]), *parts[2:]]
        return dataclasses.replace(self, parts=(*parts, part), created=created)


def _fold(one: ReportPart, other: ReportPart) -> ReportPart:
    """Return the sum of two parts, whose engines have most likely ended. If their versions differ, the
    evidence counts for no version's probation."""
    found: dict[tuple[Any, ...], ReportEntry] = {}
    for entry in (*one.entries, *other.entries):
        key = entry.cell, entry.source, entry.epoch, entry.selection
        known = found.get(key)
        found[key] = (
            entry
            if known is None
            else dataclasses.replace(known, slot=max(known.slot, entry.slot), tally=known.tally + entry.tally)
        )
    folded = (*one.folded, one.writer, *other.folded, other.writer)
    return ReportPart(
        writer=FOLDED,
        versions=one.versions if one.versions == other.versions else "",
        at=other.at,
        entries=tuple(found.values())[:ENTRIES_MAX],
        closings=(*one.closings, *other.closings)[-CLOSINGS_MAX:],
        openings=(*one.openings, *other.openings)[:ENTRIES_MAX],
        folded=tuple(writer for writer in folded if writer != FOLDED)[-FOLDED_MAX:],
    )


def source_of(namespace: str) -> str:
    """Return the source of a namespace's evidence: a digest, because reports need no names of tenants. Parts
    of a namespace count as one source, because callers can create any number of parts."""
    return blake3.blake3(b"kintsugi-source\0" + base_of(namespace).encode()).hexdigest()[:16]


def share_of_slot(slot: int) -> float:
    """Return a slot's share of the error probability. The shares of all slots sum to 1."""
    return FIRST_SLOT if slot == 1 else (1 - FIRST_SLOT) / ((slot - 1) * slot)


def _share_of_epoch(epoch: int) -> float:
    """Return the share of a slot's error probability after this many closings. All shares sum to 1."""
    return FIRST_EPOCH if epoch == 0 else (1 - FIRST_EPOCH) / 2**epoch

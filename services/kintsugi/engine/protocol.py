"""Messages between the scheduler's side and the worker's side of the connector."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.plan import BlendPlan, ChunkHit
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.fusor.control.estimates import Meter, Transfer


@dataclass(frozen=True)
class JobTokens:
    """The tokens of a request that the worker computes, and the cache blocks that hold them."""

    request_id: str
    token_ids: list[int]
    """Tokens of positions `[start, start + len)`."""
    start: int
    block_ids: tuple[list[int], ...]
    """Block ids per KV cache group, from position 0 on; 0 is vLLM's null block."""


@dataclass(frozen=True)
class BlendJob:
    """A blend that the worker computes."""

    tokens: JobTokens
    plan: BlendPlan
    manifests: dict[ChunkKey, ChunkManifest]
    """The manifests of the plan's hits by key. A manifest names its chunk's namespace."""
    explain: bool
    timeline: bool
    next_token_id: int
    """The prompt's last token, which the engine computes after the blend."""
    yields: bool = False
    """Whether the blend pauses while other requests are prefilled or blended: no client waits for it."""


@dataclass(frozen=True)
class SaveJob:
    """A save or an audit of one chunk."""

    tokens: JobTokens
    space: ChunkSpace
    key: ChunkKey
    anchors: tuple[int, ...]
    chunk_start: int
    chunk_end: int
    is_audit: bool = False
    """Compare the chunk with the stored one of the same key, and store nothing."""
    ttl_s: float = 0.0
    """Lifetime of the chunk; 0: the store's default."""
    asked_at_s: float = 0.0
    """As in `ChunkManifest`."""
    context_keys: tuple[ChunkKey, ...] = ()
    """As in `ChunkManifest.of`."""


@dataclass(frozen=True)
class ProbeJob:
    """Chunks whose first layers are read to measure the speed of loading. No request waits for it."""

    hits: tuple[ChunkHit, ...]
    manifests: dict[ChunkKey, ChunkManifest]


@dataclass(frozen=True)
class PassSample:
    """Measured times of one blend, in seconds."""

    busy_s: float
    """Time in the blend's slices, without waiting for layers."""
    load_wait_s: float
    projection_share: float
    """The model's projection share, see `fusor.stack.DecoderStack`."""


@dataclass(frozen=True)
class LoadSample:
    """Measured loads of one blend's or probe's streams."""

    transfers: tuple[Transfer, ...]
    decode_s: float
    decode_bytes: int

    @staticmethod
    def of(meters: Sequence[Meter]) -> LoadSample:
        """Combine streams that ran side by side: they wait and decode at the same time."""
        transfers = [
            dataclasses.replace(transfer, wait_s=transfer.wait_s / len(meters))
            for meter in meters
            for transfer in meter.transfers
        ]
        decode_s = sum(meter.decode_s for meter in meters) / max(len(meters), 1)
        return LoadSample(tuple(transfers), decode_s, sum(meter.decode_bytes for meter in meters))


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """New work and cancellations of one engine step."""

    blends: list[BlendJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    cache_is_reset: bool = False
    """Whether the cache blocks of all work so far have lost their content. It comes before the step's new
    work."""
    prefills: bool = False
    """Whether vLLM prefills a request in this step."""
    probes: list[ProbeJob] = field(default_factory=list)
    discovered: list[SaveJob] = field(default_factory=list)
    """Saves of discovered segments, for which no request waits. A step begins at most one batch."""
    idle_tokens: int = 0
    """Work that saves of discovered segments may do in this step: a number of tokens through all layers; 0:
    none."""

    @property
    def is_empty(self) -> bool:
        """Whether the step has no new work, no cancellation and no share for idle saves."""
        work = (self.blends, self.saves, self.cancelled, self.probes, self.discovered)
        return not (any(work) or self.cache_is_reset or self.idle_tokens)


@dataclass(frozen=True)
class WorkerFacts(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Facts about the model that a worker learns at start."""

    restores_keys: bool
    """Whether every stored key is captured before its rotation. Otherwise keys are unrotated from attention's
    input, and rotating them again differs by rounding."""
    sees_order_alone: bool
    attending: tuple[int, ...]
    """Both as in `fusor.stack.DecoderStack`."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Results of a worker's steps: finished jobs by request id, samples, and whether it can blend at all."""

    finished: dict[str, Accounting] = field(default_factory=dict)
    unable: str | None = None
    """The reason why blending is off on this worker; None if it is on."""
    passes: dict[str, PassSample] = field(default_factory=dict)
    """Samples of finished blends without restarts, by request id."""
    loads: list[LoadSample] = field(default_factory=list)
    discovered: list[Accounting] = field(default_factory=list)
    """Outcomes of a batch of discovered segments, after all of its saves have ended."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Combine the reports of two tensor-parallel ranks: sum bytes, take the longest waits, prefer
        failures."""
        assert isinstance(other, WorkerReport)
        finished = dict(self.finished)
        for request_id, theirs in other.finished.items():
            mine = finished.get(request_id)
            finished[request_id] = theirs if mine is None else _merge(mine, theirs)
        passes = dict(self.passes)
        for request_id, sample in other.passes.items():
            slower = passes.get(request_id, sample)
            passes[request_id] = max(slower, sample, key=lambda one: one.busy_s + one.load_wait_s)
        return WorkerReport(
            finished,
            self.unable or other.unable,
            passes,
            self.loads + other.loads,
            self.discovered + other.discovered,
        )


def _merge(mine: Accounting, theirs: Accounting) -> Accounting:
    worse = theirs if theirs.outcome is Outcome.FAILED else mine
    return dataclasses.replace(
        mine,
        outcome=worse.outcome,
        reason=worse.reason,
        bytes_loaded=mine.bytes_loaded + theirs.bytes_loaded,
        load_wait_ms=max(mine.load_wait_ms, theirs.load_wait_ms),
        compute_ms=max(mine.compute_ms, theirs.compute_ms),
        blend_ms=max(mine.blend_ms, theirs.blend_ms),
        audit=mine.audit or theirs.audit,
    )

"""The connector's configuration: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import codec_named
from kintsugi.core.namespaces import SALT, narrow
from kintsugi.core.plan import Selection
from kintsugi.core.request import SelectorName
from kintsugi.core.schema import STRICT
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint


@dataclass(frozen=True)
class DiscoveryConfig:
    """Settings of discovery, which finds recurring chunks in prompts. See docs/adr/0013."""

    __pydantic_config__ = STRICT

    enabled: bool = True
    """Whether segments of requests with `discover` are counted, and recurring ones saved."""

    namespace: str = ""
    """Namespace of requests that name none, which are then discovered, too; each `cache_salt` makes a
    sub-namespace. Empty: such requests are left to vLLM. Their callers share the discovered chunks, so set a
    namespace only if they may know each other's texts."""

    sights: int = 2
    """Number of prompts in which a segment must occur before it is saved."""

    share: float = 0.5
    """Tokens that saving may compute per prompt token."""

    ttl_s: float = 86_400.0
    """Maximum lifetime of a discovered chunk, and how long counted segments are remembered."""

    def __post_init__(self) -> None:
        if self.namespace:
            _check_can_be_narrowed(self.namespace)
        if not 1 <= self.sights <= 255:
            raise InvalidField("discovery.sights", f"{self.sights} is outside [1, 255]")
        if not 0.0 < self.share <= 10.0:
            raise InvalidField(
                "discovery.share", f"{self.share} is outside (0, 10]; to save nothing, set enabled to false"
            )
        if not 1.0 <= self.ttl_s < math.inf:
            raise InvalidField("discovery.ttl_s", f"{self.ttl_s} must be at least 1 and finite")


def _check_can_be_narrowed(namespace: str) -> None:
    """Raise `InvalidField` if a `cache_salt` cannot be added to the namespace as a part."""
    try:
        narrow(namespace, {SALT: "any"})
    except InvalidField as error:
        raise InvalidField(
            "discovery.namespace", f"cannot take a part for a cache_salt: {error.problem}"
        ) from None


SELF_TEST_CHECKS = (
    "full ratio",
    "own prefix",
    "scattered tokens",
    "shifted keys: K",
    "shifted keys: V",
    "names",
)
"""Names of the start-up checks (`engine.worker.selftest`, `engine.scheduler.selftest`), as `self_test_failed`
reasons contain them."""


@dataclass(frozen=True)
class EngineConfig:
    """The connector's settings, read with `core.schema.load`, which rejects unknown keys."""

    __pydantic_config__ = STRICT

    store: str = "ram://default"
    """URL of the chunk store. A `ram://` store lives in the engine's process and ends with it."""

    prefix_token_ids: list[int] | None = None
    """Token ids that precede every chunk when it is prefilled. None: the text that the model's chat template
    writes before a user's message; without a template, the tokenizer's special tokens before a text."""

    portable: bool = True
    """Whether chunks that were prefilled after the prefix may be used after another one."""

    context_token_ids: list[int] = field(default_factory=list)
    """Natural text between the prefix and each chunk while the chunk is prefilled. Empty: none."""

    plain_copies: bool = True
    """Whether saving a chunk with a context also stores a plain copy, prefilled after the prefix alone, for
    prompts that begin with the chunk. Without plain copies, a prompt's first chunk is computed. Plain copies
    double the stored bytes."""

    report: str | None = None
    """Path of a calibration report. None: the store's report for the model's fingerprint."""

    report_poll_ms: int = 5_000
    """Period at which the report is read again: how long a new or a tripped one takes to be noticed."""

    allow_uncalibrated: bool = False
    """Blend without a passing report, by `ratio`, `selector` and `check_layer`. For tests with random weights
    and for experiments; `$KINTSUGI_ALLOW_UNCALIBRATED=1` has the same effect."""

    audits: bool = False
    """Accept requests that audit stored chunks (`op=audit`). Kintsugi's own engines set it, because their
    callers cannot send such requests; under plain `vllm serve` any caller can."""

    save_only: bool = False
    """Save chunks and blend nothing; no report is read. For precompute's workers."""

    ratio: float = 0.15
    """Recompute ratio of requests that name none: the share of the hit tokens that a blend recomputes. A
    calibration report's choice replaces this and the next two settings. A service's shards use this ratio to
    choose tiers, so set it to the report's."""

    selector: str = SelectorName.HKVD
    """Selector of requests that name none. A calibration report's choice replaces it."""

    check_layer: int = 1
    """Layer whose KV deviation is measured, for selectors that use it. The best layer depends on the
    model."""

    query_layers: list[int] | None = None
    """Layers at which the question's attention is measured, ascending; the question passes once more through
    all layers up to the last of them. None: the fusor's choice for the model's depth."""

    adaptive_mass: float | None = None
    """Makes the ratio an upper bound: only the tokens that hold this share of the selector's signal are
    recomputed. None: always use the whole ratio."""

    adaptive_ratio_min: float = 0.05
    """Lower bound of an adaptive ratio."""

    codec: str = "raw"
    """Codec of stored chunks: `raw`, or `int8` or `fp8` for half the bytes; `int8_sinks` and `fp8_sinks`
    keep a chunk's first tokens in 16 bit. Loaded chunks are decoded by the codec in their manifest."""

    loading_controller: bool = True
    """Prefill a prompt in full if a blend is predicted to be slower, recompute chunks that load slowly, and
    raise the ratio if loading hides the extra work. Off: blend everything that can be blended, for
    measuring."""

    ratio_max: float = 0.5
    """Maximum ratio to which the loading controller may raise that of a request that named none."""

    prefetch_layers: int = 4
    """Number of layers that loading may run ahead of computing. Bounds host memory per blend."""

    layer_deadline_ms: int = 2_000
    """Maximum time to load a layer. A layer that takes longer is lost, and its chunks are recomputed."""

    lookup_deadline_ms: int = 500
    """Maximum time of a lookup in the store. After it, the prompt is prefilled in full."""

    slice_tokens: int | None = None
    """Work of blends per engine step, in tokens computed in all layers. None: half of the scheduler's
    `max_num_batched_tokens`, so that a decode waits no longer for a blend than for a prefill."""

    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    """Settings for passages that recur without being declared as chunks."""

    self_test: bool = True
    """Check at start that a blend equals the engine's own prefill. Off: a defect would go unnoticed."""

    def __post_init__(self) -> None:
        for name in (
            "check_layer",
            "prefetch_layers",
            "layer_deadline_ms",
            "lookup_deadline_ms",
            "report_poll_ms",
        ):
            if getattr(self, name) < 1:
                raise InvalidField(name, f"{getattr(self, name)} must be at least 1")
        if not 0.0 <= self.ratio_max <= 1.0:
            raise InvalidField("ratio_max", f"{self.ratio_max} is outside [0, 1]")
        if self.slice_tokens is not None and self.slice_tokens < 1:
            raise InvalidField("slice_tokens", f"{self.slice_tokens} must be at least 1")
        codec_named(self.codec)
        _ = self.selection  # checks its fields

    def space(
        self, model: ModelFingerprint, namespace: str, prefix_token_ids: Sequence[int], name_key: bytes = b""
    ) -> ChunkSpace:
        """Return the chunk space of a namespace's requests."""
        context = tuple(self.context_token_ids)
        return ChunkSpace(model, namespace, tuple(prefix_token_ids), self.portable, context, name_key)

    @property
    def selection(self) -> Selection:
        """The selection of requests that name none. Raises `InvalidField`."""
        return Selection(
            self.ratio,
            self.selector,
            self.check_layer,
            tuple(self.query_layers or ()),
            self.adaptive_mass,
            self.adaptive_ratio_min,
        )

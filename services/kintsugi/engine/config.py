"""The connector's configuration: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import codec_named
from kintsugi.core.namespaces.parts import SALT, narrow
from kintsugi.core.plan import Selection
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.core.schema import STRICT


@dataclass(frozen=True)
class DiscoveryConfig:
    """How chunks are discovered in prompts. See docs/adr/0013."""

    __pydantic_config__ = STRICT

    enabled: bool = True
    """Whether requests that say `discover` are counted, and what recurs is saved."""

    namespace: str = ""
    """The namespace of requests that name none, which are then discovered, too; each `cache_salt` makes a
    sub-namespace. Empty: such requests are vLLM's alone. All their callers share what is found, so set it
    only where they may know of each other's texts."""

    sights: int = 2
    """A segment is saved when it has been seen in this many prompts."""

    share: float = 0.5
    """Tokens that saving may compute, per token of prompts seen."""

    ttl_s: float = 86_400.0
    """The longest lifetime of a discovered chunk. Segments are remembered as long."""

    default_ttl_s: float | None = None
    """Lifetime of what is discovered in requests that ask for none. None: `ttl_s`."""

    def __post_init__(self) -> None:
        if self.namespace:
            _check_can_be_narrowed(self.namespace)
        if not 1 <= self.sights <= 255:
            raise InvalidField("discovery.sights", f"{self.sights} is outside [1, 255]")
        if not 0.0 < self.share <= 10.0:
            raise InvalidField(
                "discovery.share", f"{self.share} is outside (0, 10]; to save nothing, unset enabled"
            )
        if not 1.0 <= self.ttl_s < math.inf:
            raise InvalidField("discovery.ttl_s", f"{self.ttl_s} must be at least 1 and finite")
        if self.default_ttl_s is not None and not 1.0 <= self.default_ttl_s <= self.ttl_s:
            raise InvalidField(
                "discovery.default_ttl_s",
                f"{self.default_ttl_s} is outside [1, {self.ttl_s:g}]; raise discovery.ttl_s as well",
            )

    def with_lifetime(self, params: KintsugiParams) -> KintsugiParams:
        """The parameters, with the default lifetime where the request asks for none."""
        if params.ttl_s is not None or self.default_ttl_s is None:
            return params
        return replace(params, ttl_s=self.default_ttl_s)


def _check_can_be_narrowed(namespace: str) -> None:
    """Raise `InvalidField` for a namespace that has no part for a `cache_salt`."""
    try:
        narrow(namespace, {SALT: "any"})
    except InvalidField as error:
        raise InvalidField("discovery.namespace", f"has no part for a cache_salt: {error.problem}") from None


SELF_TEST_CHECKS = (
    "full ratio",
    "own prefix",
    "scattered tokens",
    "shifted keys: K",
    "shifted keys: V",
    "names",
)
"""What an engine checks when it starts (`engine.worker.selftest`, `engine.scheduler.selftest`): the names
that a `self_test_failed` reason gives."""


@dataclass(frozen=True)
class EngineConfig:
    """Read with `core.schema.load`: an unknown key is an error that names the nearest valid one."""

    __pydantic_config__ = STRICT

    store: str = "ram://default"
    """URL of the chunk store. `ram://` lives in the engine's process and dies with it."""

    prefix_token_ids: list[int] | None = None
    """What chunks were prefilled behind. None: what the model's chat template writes before a user's message;
    without a template, the special tokens that the tokenizer puts before a text."""

    portable: bool = True
    """Whether chunks prefilled behind the prefix may be used behind another one."""

    context_token_ids: list[int] = field(default_factory=list)
    """Natural text between the prefix and each chunk while the chunk is prefilled. Empty: none."""

    plain_copies: bool = True
    """With a context: whether saving a chunk also stores a plain copy, prefilled behind the prefix alone, for
    prompts that begin with the chunk. Without plain copies, a prompt's first chunk is computed. Half of the
    stored bytes are plain copies."""

    report: str | None = None
    """Path of a calibration report. None: the store's, by the model's fingerprint."""

    report_poll_ms: int = 5_000
    """How often the report is read again: how long a drift, or a new calibration, takes to be noticed."""

    allow_uncalibrated: bool = False
    """Blend without a passing report, as `ratio`, `selector` and `check_layer` say. For random weights, and
    for those who know better; `$KINTSUGI_ALLOW_UNCALIBRATED=1` does the same."""

    audits: bool = False
    """Accept requests that audit stored chunks (`op=audit`). Kintsugi's own engines set it, because their
    callers cannot send such requests; under plain `vllm serve` everybody can."""

    save_only: bool = False
    """Save chunks and blend nothing: no report is read, and none is missed. For precompute's workers."""

    ratio: float = 0.15
    """Share of the hit tokens that a blend recomputes where a request names none. With a calibration report
    the report's choice counts, not this, nor the two below. A service's shards choose the tiers of chunks by
    this ratio all the same: give it the report's."""

    selector: str = SelectorName.HKVD
    """Selector of requests that name none; the report's choice goes before it."""

    check_layer: int = 1
    """Layer whose KV deviation selects, for selectors that look at it. Differs from model to model."""

    query_layers: list[int] | None = None
    """Layers at which attention from the question counts, ascending; the question passes through all up
    to the last of them once more. None: the fusor's choice for the model's depth."""

    adaptive_mass: float | None = None
    """Makes the ratio a ceiling: no more tokens are recomputed than hold this share of the selector's
    signal. None: always the whole ratio."""

    adaptive_ratio_min: float = 0.05
    """Floor of an adaptive ratio."""

    codec: str = "raw"
    """How chunks are stored: `raw`, or `int8` or `fp8` for half the bytes; `int8_sinks` and `fp8_sinks`
    keep a chunk's first tokens in 16 bit. What is loaded is decoded as it was stored, whatever this says."""

    loading_controller: bool = True
    """Prefill a prompt in full where a blend is predicted to be slower, recompute chunks that load slowly,
    and raise the ratio where loading hides it. Off: blend whatever can be, as asked; for measuring."""

    ratio_max: float = 0.5
    """How far the loading controller may raise a ratio that a request did not name. At or below the ratio:
    never."""

    prefetch_layers: int = 4
    """Layers that loading may run ahead of computing: bounds host memory per blend."""

    layer_deadline_ms: int = 2_000
    """A layer that takes longer to load is lost: its chunks are recomputed."""

    lookup_deadline_ms: int = 500
    """A store that takes longer to say what it has is not waited for: the prompt is prefilled in full."""

    slice_tokens: int | None = None
    """Full-width tokens' worth of work per engine step, over all layers. None: half of the scheduler's
    `max_num_batched_tokens`, so that a decode beside a blend waits no longer than beside a prefill."""

    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    """What is done about passages that recur without being declared as chunks."""

    self_test: bool = True
    """Check at start that blending gives the engine's own answers; off, nothing would notice a defect."""

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

    @property
    def selection(self) -> Selection:
        """What a request that names nothing is blended with. Raises `InvalidField`."""
        return Selection(
            self.ratio,
            self.selector,
            self.check_layer,
            tuple(self.query_layers or ()),
            self.adaptive_mass,
            self.adaptive_ratio_min,
        )

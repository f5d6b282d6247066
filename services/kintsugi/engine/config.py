"""Settings of an engine: the connector's (`kv_connector_extra_config` of vLLM's `--kv-transfer-config`), and
those of vLLM's OpenAI server that are not part of `AsyncEngineArgs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar

from kintsugi.core.errors import InvalidField
from kintsugi.core.evidence import Quality
from kintsugi.core.layout import codec_named
from kintsugi.core.namespaces import SALT, narrow
from kintsugi.core.plan import Selection
from kintsugi.core.plugins import SELECTORS, plugin_names
from kintsugi.core.request import SelectorName
from kintsugi.core.schema import OFF_IN_YAML, STRICT
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint

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
    """Whether chunks that were prefilled after the prefix may be used in prompts with another prefix."""

    context_token_ids: list[int] = field(default_factory=list)
    """Natural text between the prefix and each chunk while the chunk is prefilled. Empty: none."""

    plain_copies: bool = True
    """Whether saving a chunk with a context also stores a plain copy, prefilled after the prefix alone, for
    prompts that begin with the chunk. Without plain copies, a prompt's first chunk is computed. Plain copies
    double the stored bytes."""

    report: str | None = None
    """Path of a report. None: the store's report for the model's fingerprint."""

    report_poll_ms: int = 5_000
    """Interval at which the report is read again; a change takes effect within this time."""

    quality: Annotated[Quality, OFF_IN_YAML] = Quality.BALANCED
    """How much accuracy a blend may lose. `strict`, `balanced`: prompts are blended only after the evidence
    shows a smaller loss. `off`: nothing is tested; blends use `ratio`, `selector` and `check_layer`."""

    audits: bool = False
    """Accept requests that audit stored chunks (`op=audit`), and trials of configurations. Kintsugi's own
    engines set it, because their callers cannot send such requests. In vLLM's own server any caller can,
    so set it there only with the learning middleware, which refuses such requests of callers."""

    save_only: bool = False
    """Save chunks and blend nothing; no report is read. For precompute workers."""

    ratio: float = 0.15
    """Recompute ratio of requests without one: the share of the hit tokens that a blend recomputes. This
    and the next two settings apply only while `quality` is off; otherwise the configuration that passed
    applies. A service's shards use this ratio to choose tiers."""

    selector: str = SelectorName.HKVD
    """Selector of requests without one, while `quality` is off. The gate tests one of another distribution in
    place of `query`."""

    check_layer: int = 1
    """Layer whose KV deviation is measured, for selectors that use it. The best layer depends on the
    model."""

    codec: str = "raw"
    """Codec of stored chunks: `raw`; `int8` or `fp8` for half the bytes, `int4` for 0.27 of them;
    `int8_sinks` and `fp8_sinks` keep a chunk's first tokens in 16 bit, as `int4` does. Loaded chunks are
    decoded by the codec in their manifest."""

    loading_controller: bool = True
    """Prefill a prompt in full if a blend is predicted to be slower, recompute chunks that load slowly, and
    raise the ratio if loading hides the extra work. Off: blend everything that can be blended, as
    measurements need."""

    layer_deadline_ms: int = 2_000
    """Maximum time to load a layer. A layer that takes longer is lost, and its chunks are recomputed."""

    lookup_deadline_ms: int = 500
    """Maximum time of a lookup in the store. After it, the prompt is prefilled in full."""

    discovery_namespace: str = ""
    """Namespace of requests without a namespace. Their recurring passages are then discovered
    (docs/adr/0013); each `cache_salt` makes a sub-namespace. Empty: such requests are left to vLLM. All
    callers without a namespace share the discovered chunks, so set one only if they may know each other's
    texts."""

    self_test: bool = True
    """Check at start that a blend equals the engine's own prefill. Off: such a defect would go unnoticed."""

    def __post_init__(self) -> None:
        for name in ("check_layer", "layer_deadline_ms", "lookup_deadline_ms", "report_poll_ms"):
            if getattr(self, name) < 1:
                raise InvalidField(name, f"{getattr(self, name)} must be at least 1")
        if self.discovery_namespace:
            self._check_discovery_namespace()
        codec_named(self.codec)
        _ = self.selection  # checks its fields

    def _check_discovery_namespace(self) -> None:
        """Raise `InvalidField` if a `cache_salt` cannot be added to the namespace as a part."""
        try:
            narrow(self.discovery_namespace, {SALT: "any"})
        except InvalidField as error:
            raise InvalidField(
                "discovery_namespace", f"no part for a cache_salt can be added to it: {error.problem}"
            ) from None

    def space(
        self, model: ModelFingerprint, namespace: str, prefix_token_ids: Sequence[int], name_key: bytes = b""
    ) -> ChunkSpace:
        """Return the chunk space of a namespace's requests."""
        return ChunkSpace(
            model,
            namespace,
            tuple(prefix_token_ids),
            self.portable,
            tuple(self.context_token_ids),
            name_key,
        )

    @property
    def selection(self) -> Selection:
        """The selection of requests without one. Raises `InvalidField`."""
        return Selection(self.ratio, self.selector, self.check_layer)

    @property
    def tested_selector(self) -> str:
        """Selector of the configurations that the gate tests."""
        return self.selector if self.selector in plugin_names(SELECTORS) else SelectorName.QUERY


@dataclass(frozen=True)
class OpenAIOptions:
    """Options of vLLM's OpenAI server."""

    __pydantic_config__: ClassVar = STRICT

    chat_template: str | None = None
    """Path of a chat template, or the template itself. None: the model's own."""
    tool_call_parser: str | None = None
    """vLLM's name of the parser of tool calls. None: requests may not offer tools."""
    reasoning_parser: str = ""
    """vLLM's name of the parser that separates a model's reasoning from its answer."""


OPENAI_OPTIONS = frozenset(one.name for one in fields(OpenAIOptions))

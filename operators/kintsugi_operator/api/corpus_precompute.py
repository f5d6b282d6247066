"""The spec of a CorpusPrecompute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kintsugi.core.rules import Rule, before, this
from kintsugi.core.settings import setting
from kintsugi.core.spaces import NAMESPACE_BYTES_MAX
from kintsugi_operator.api.common import Nodes
from kintsugi_operator.api.manifest import ManifestSettings
from kintsugi_operator.api.patterns import CRON, NAME, NAMESPACE, OPTIONAL_NAME, QUANTITY
from kintsugi_operator.api.pod_template import PodTemplate


class CorpusFormat(StrEnum):
    """The format of a corpus's files."""

    BY_SUFFIX = ""
    JSONL = "jsonl"
    PARQUET = "parquet"
    CSV = "csv"
    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"


@dataclass(frozen=True)
class CorpusColumns(ManifestSettings):
    """Where a corpus's rows hold what."""

    text: str = setting("text", minLength=1, maxLength=255)
    id: str = setting("id", minLength=1, maxLength=255)
    version: str = setting("version", minLength=1, maxLength=255)


@dataclass(frozen=True)
class CorpusWorkers(ManifestSettings):
    """Engines of the job."""

    replicas: int = setting(1, minimum=1, maximum=1024)
    cpus: float = setting(4.0, minimum=0.1, maximum=1024)
    memory: str = setting("16Gi", pattern=QUANTITY, maxLength=32)
    gpus: int = setting(0, minimum=0, maximum=16)
    gpu_resource: str = setting("nvidia.com/gpu", minLength=1, maxLength=253)
    scratch: str = setting("20Gi", pattern=QUANTITY, maxLength=32)
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `vllm.LLM`."""
    nodes: Nodes = field(default_factory=Nodes)
    pod_template: PodTemplate = field(default_factory=PodTemplate)
    """Additions to the pods of the job."""


@dataclass(frozen=True)
class CorpusPrecomputeSpec(ManifestSettings):
    """Documents whose chunks are prefilled before anybody asks."""

    RULES = (
        Rule(this.overlap < this.tokens_max, "overlap must be less than tokensMax", "overlap"),
        Rule(this.service == before.service, "a corpus keeps its service: make another CorpusPrecompute"),
        Rule(this.namespace == before.namespace, "a corpus keeps its namespace: make another"),
    )

    service: str = setting(minLength=1, maxLength=63, pattern=NAME)
    """A BlendService in this namespace: its model, its image, its store."""
    namespace: str = setting(minLength=1, maxLength=NAMESPACE_BYTES_MAX, pattern=NAMESPACE)
    """Tenant whose chunks they become."""
    source: str = setting(minLength=1, maxLength=2048)
    """File, folder or URL."""
    volume_claim: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """A PersistentVolumeClaim with documents, mounted read-only at /corpus."""
    credentials_secret: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """A Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID."""
    format: CorpusFormat = CorpusFormat.BY_SUFFIX
    columns: CorpusColumns = field(default_factory=CorpusColumns)
    tokens_max: int = setting(512, minimum=1, maximum=1048576)
    """Per chunk."""
    overlap: int = setting(0, minimum=0, maximum=1048576)
    """Tokens of a chunk that begin the next one."""
    errors_share: float = setting(0.05, minimum=0, maximum=1)
    """Documents that may fail."""
    tokens_per_s: float = setting(0.0, minimum=0)
    """Rate limit; 0: none."""
    workers: CorpusWorkers = field(default_factory=CorpusWorkers)
    schedule: str = setting("", maxLength=100, pattern=CRON)
    """Cron, five fields, UTC; empty: once, and again for every new model or change of this spec."""
    suspend: bool = False
    """Stop a running job and start none. What was prefilled stays; the job goes on from there."""
    ttl_s: int = setting(3600, minimum=0, maximum=31536000)
    """Seconds that a finished job stays."""
    retire_old_editions: bool = False
    """Delete, at the end of a run, chunks of models that were replaced before it began. Those of the model
    before this one stay, for a way back."""
    ledger_gib: float = setting(1.0, minimum=0.1, maximum=1024)
    """Volume that remembers which document has which chunks."""

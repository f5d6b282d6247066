"""The spec of a CorpusPrecompute."""

from __future__ import annotations

from dataclasses import dataclass, field

from kintsugi.core.settings import Rule, before, setting, this
from kintsugi.core.spaces import NAMESPACE_BYTES_MAX
from kintsugi_operator.api.manifest import ManifestSettings
from kintsugi_operator.api.patterns import CRON, NAME, NAMESPACE, OPTIONAL_NAME, QUANTITY
from kintsugi_operator.api.pod_template import HeadSize


@dataclass(frozen=True)
class CorpusColumns(ManifestSettings):
    """Names of the columns, or keys, that hold the parts of a document."""

    text: str = setting("text", minLength=1, maxLength=255)
    """Column with the document's text."""
    id: str = setting("id", minLength=1, maxLength=255)
    """Column with the document's id."""
    version: str = setting("version", minLength=1, maxLength=255)
    """Column with the document's version."""


@dataclass(frozen=True)
class CorpusWorkers(ManifestSettings):
    """Engines of the job, which prefill the chunks."""

    replicas: int = setting(1, minimum=1, maximum=1024)
    """Number of engines."""
    cpus: float = setting(4.0, minimum=0.1, maximum=1024)
    """CPU cores of each engine's pod."""
    memory: str = setting("16Gi", pattern=QUANTITY, maxLength=32)
    """Memory of each engine's pod."""
    gpus: int = setting(0, minimum=0, maximum=16)
    """GPUs of each engine's pod; 0: vLLM runs on the CPU."""


@dataclass(frozen=True)
class CorpusExpert(ManifestSettings):
    """Rarely needed settings of a corpus."""

    format: str = setting("", enum=["", "jsonl", "parquet", "csv", "text", "markdown", "html", "pdf", "docx"])
    """Format of the files: jsonl, parquet, csv, text, markdown, html, pdf or docx; empty: by each
    file's suffix."""
    columns: CorpusColumns = field(default_factory=CorpusColumns)
    errors_share: float = setting(0.05, minimum=0, maximum=1)
    """Share of the documents that may fail without failing the job, 0 to 1."""
    tokens_per_s: float = setting(0.0, minimum=0)
    """Maximum number of tokens that the job prefills per second; 0: no limit."""
    ttl_s: int = setting(3600, minimum=0, maximum=31536000)
    """Time in seconds after which a finished job's objects are deleted."""
    retire_old_editions: bool = False
    """At the end of a run, delete the chunks of models that were replaced before it began. Chunks of the
    previous model stay, so that it can be restored."""
    head: HeadSize = field(default_factory=lambda: HeadSize(cpus=2.0, memory="8Gi"))
    """Size of the job's head, which reads and cuts the documents."""
    ledger_gib: float = setting(1.0, minimum=0.1, maximum=1024)
    """Size in GiB of the volume that records which document has which chunks."""


@dataclass(frozen=True)
class CorpusPrecomputeSpec(ManifestSettings):
    """Documents whose chunks are prefilled before the first request."""

    RULES = (
        Rule(this.overlap < this.tokens_max, "overlap must be less than tokensMax", "overlap"),
        Rule(
            this.service == before.service,
            "the service of a corpus cannot be changed: create another CorpusPrecompute",
        ),
        Rule(
            this.namespace == before.namespace, "the namespace of a corpus cannot be changed: create another"
        ),
    )

    service: str = setting(minLength=1, maxLength=63, pattern=NAME)
    """Name of the BlendService in this namespace whose model, image and store the job uses."""
    namespace: str = setting(minLength=1, maxLength=NAMESPACE_BYTES_MAX, pattern=NAMESPACE)
    """Namespace of the store, and so the tenant, that the chunks belong to."""
    source: str = setting(minLength=1, maxLength=2048)
    """File, folder or URL of the documents."""
    volume_claim: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """A PersistentVolumeClaim with documents, mounted read-only at /corpus."""
    credentials_secret: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """A Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID."""
    tokens_max: int = setting(512, minimum=1, maximum=1048576)
    """Maximum number of tokens in a chunk."""
    overlap: int = setting(0, minimum=0, maximum=1048576)
    """Number of tokens at the end of a chunk that the next one repeats; less than tokensMax."""
    workers: CorpusWorkers = field(default_factory=CorpusWorkers)
    schedule: str = setting("", maxLength=100, pattern=CRON)
    """When to fill the corpus again: cron, five fields, UTC. Empty: once, and again for every new model or
    change of this spec."""
    suspend: bool = False
    """Stop a running job and start no other. Prefilled chunks stay; without `suspend` the job continues."""
    expert: CorpusExpert = field(default_factory=CorpusExpert)

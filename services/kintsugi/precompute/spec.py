"""The specification of a job, and the facts about its model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import Codec, KVLayout, codec_named
from kintsugi.core.sizing import engine_dtype, model_size, text_config
from kintsugi.core.spaces import ChunkSpace, check_namespace
from kintsugi.models.checkpoint import checkpoint_folder, kv_dtype_of, model_fingerprint, read_config
from kintsugi.models.hub import is_hub_name
from kintsugi.models.prompt_form import load_form
from kintsugi.models.reference import default_dtype, find_packaged, is_bundled
from kintsugi.precompute.chunking import ChunkingConfig
from kintsugi.precompute.similar import CONTEXT_CHUNKS
from kintsugi.precompute.sources.files import Format
from kintsugi.precompute.sources.readers import Columns
from kintsugi.store.client.registry import is_process_local, name_key_of

POSITIONS_UNKNOWN = 1 << 20
"""Context length to assume if neither the engine's arguments nor the checkpoint state one."""
_CORPUS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class JobSpec:
    """One job. A new run of the same spec continues where the last run stopped."""

    source: str
    """Path or URL of a file or folder."""
    model: str
    """Checkpoint folder that exists on every machine with a worker; or a hub name, `org/model`, or the
    reference model's name, which each machine downloads."""
    store: str
    """URL that every worker can reach: grpc://, shards:// or shardfile://."""
    namespace: str
    """The tenant whose requests will use the chunks."""
    corpus: str = ""
    """Name of the corpus. Empty: derived from the last part of the source."""
    format: Format | None = None
    """Format of all files; None: each file's suffix decides."""
    columns: Columns = field(default_factory=Columns)
    chunking: ChunkingConfig = field(default_factory=ChunkingConfig)
    prefix_token_ids: list[int] | None = None
    """The prefix, as in the engine's configuration; None: the head of the model's own prompt form."""
    portable: bool = True
    """Whether the chunks may be used in prompts with another prefix, as in the engine's configuration."""
    context_token_ids: list[int] = field(default_factory=list)
    """Tokens between the prefix and each chunk when it is prefilled, as in the engines' configuration."""
    similar_contexts: bool = False
    """Prefill chunks after similar passages of the corpus instead of this context. Then every caller that may
    read one chunk of the corpus must be allowed to read all of it."""
    plain_copies: bool = True
    """Whether a plain copy of each chunk is stored too, if there is a context. As in the engines'
    configuration."""
    codec: str = "raw"
    """Name of the codec, as configured for the serving engines."""
    workers: int = 1
    """Number of workers. Each runs its own engine."""
    gpus_per_worker: float = 0.0
    """GPUs of each worker, as Ray counts them: below 1, several workers share one; 0 runs vLLM on the CPU."""
    batch_tokens: int = 16_384
    """Tokens per batch. A worker that dies loses one batch."""
    tokens_per_s_max: float = 0.0
    """Rate limit over all workers; 0 means none."""
    bytes_max: int = 0
    """Maximum KV bytes of the corpus in the store; 0 means the store's capacity."""
    errors_share_max: float = 0.05
    """Share of documents that may fail without failing the job."""
    replace_model: bool = False
    """Allow chunks of a second model in addition to the first one's, which can be retired afterwards."""
    retire: bool = False
    """When the job is complete, delete editions that were already replaced before it began. The edition that
    was complete last stays, because engines may still serve it."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of `vllm.LLM`, such as max_model_len or gpu_memory_utilization."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        codec_named(self.codec)
        if is_process_local(self.store):
            raise InvalidField(
                "store",
                f"{self.store!r} exists in one process only; run a shard (kintsugi store serve) and use "
                "grpc://host:port",
            )
        if self.corpus and not _CORPUS.fullmatch(self.corpus):
            raise InvalidField(
                "corpus",
                f"{self.corpus!r} must have at most 100 letters, digits, dots, dashes and underscores",
            )
        for name, least in (
            ("workers", 1),
            ("batch_tokens", 1),
            ("gpus_per_worker", 0),
            ("tokens_per_s_max", 0),
            ("bytes_max", 0),
        ):
            if getattr(self, name) < least:
                raise InvalidField(name, f"{getattr(self, name)} must be at least {least}")
        if self.similar_contexts and not self.context_token_ids:
            raise InvalidField("similar_contexts", "needs context_token_ids, the engines' context")
        if not 0 <= self.errors_share_max <= 1:
            raise InvalidField("errors_share_max", f"{self.errors_share_max} is outside [0, 1]")

    @property
    def corpus_name(self) -> str:
        if self.corpus:
            return self.corpus
        last = re.sub(r"[^A-Za-z0-9._-]+", "-", self.source.rstrip("/").rsplit("/", 1)[-1]).lstrip("._-")
        return f"{last[:80] or 'corpus'}@{self.namespace}"

    @property
    def model_folder(self) -> str:
        """The model in a form that is valid in other working folders and on other machines: an absolute path,
        or a name that the machine downloads."""
        folder = Path(self.model)
        is_name = find_packaged(folder) is not None or is_bundled(folder)
        is_name = is_name or (not folder.is_dir() and is_hub_name(folder))
        return self.model if is_name else str(folder.resolve())


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a checkpoint that a job needs. They are found without loading the weights."""

    dtype: str
    space: ChunkSpace
    layout: KVLayout
    codec: Codec

    @staticmethod
    def of(spec: JobSpec) -> ModelFacts:
        """Collect the facts. Cost of the first call: every weight file is read once (see
        `models.checkpoint`); for a hub name, the model's small files are downloaded instead.

        Raises `NotFound`, `Corrupted` and `InvalidField` if the folder is not a checkpoint or chunks would
        exceed the model's context; `NotBlendable` for a model that cannot be blended; `Unavailable` if the
        hub does not answer.
        """
        folder = checkpoint_folder(spec.model, spec.engine.get("revision"))
        config = read_config(folder)
        dtype = engine_dtype(config, str(spec.engine.get("dtype", default_dtype(spec.model))))
        layout = model_size(config, dtype).layout
        text = text_config(config)
        quantization = (config.get("quantization_config") or {}).get("quant_method")
        cache_dtype = str(spec.engine.get("kv_cache_dtype", "auto"))
        overrides = spec.engine.get("hf_overrides")
        positions = _context_length(spec, text)
        fingerprint = model_fingerprint(
            folder,
            kv_dtype_of(dtype, cache_dtype, spec.engine.get("quantization") or quantization),
            overrides if isinstance(overrides, dict) else None,
            max_model_len=spec.engine.get("max_model_len"),
        )
        prefix = spec.prefix_token_ids
        if prefix is None:
            prefix = list(load_form(folder, vllm_args=spec.engine).head)
        # One token follows the chunk, and one token is generated.
        # A context of similar passages is as long as two chunks of the corpus.
        own = CONTEXT_CHUNKS * spec.chunking.tokens_max if spec.similar_contexts else 0
        longest = positions - len(prefix) - max(len(spec.context_token_ids), own) - 2
        if spec.chunking.tokens_max > longest:
            raise InvalidField(
                "chunking.tokens_max",
                f"{spec.chunking.tokens_max} exceeds {longest}, the longest chunk that the model can read",
            )
        context = tuple(spec.context_token_ids)
        name_key = name_key_of(spec.store, spec.namespace)
        space = ChunkSpace(fingerprint, spec.namespace, tuple(prefix), spec.portable, context, name_key)
        return ModelFacts(dtype, space, layout, codec_named(spec.codec))


def _context_length(spec: JobSpec, text: Mapping[str, Any]) -> int:
    """Return the engine's context length in tokens: `max_model_len` if set, else the checkpoint's."""
    given = spec.engine.get("max_model_len")
    positions = given or text.get("max_position_embeddings") or POSITIONS_UNKNOWN
    if not isinstance(positions, int):
        field = "engine.max_model_len" if given else "max_position_embeddings"
        raise InvalidField(field, f"{positions!r} is not a number of tokens")
    return positions

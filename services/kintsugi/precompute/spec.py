"""What a job is asked to do, and what its model is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import Codec, KVLayout, codec_named
from kintsugi.core.schema import STRICT
from kintsugi.core.sizing import engine_dtype, model_size, text_config
from kintsugi.core.spaces import ChunkSpace, check_namespace
from kintsugi.models.checkpoint import checkpoint_folder, kv_dtype_of, model_fingerprint, read_config
from kintsugi.models.hub import is_hub_name
from kintsugi.precompute.chunking import ChunkingConfig
from kintsugi.precompute.sources.files import Format
from kintsugi.precompute.sources.readers import Columns
from kintsugi.store.client.registry import is_process_local

POSITIONS_UNKNOWN = 1 << 20
"""Where neither the engine nor the checkpoint bounds a prompt."""
_CORPUS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class JobSpec:
    """One job. The same spec given again goes on where the last one stopped."""

    __pydantic_config__ = STRICT

    source: str
    """Path or URL of a file or folder; its name where a Ray dataset is given beside the spec."""
    model: str
    """Checkpoint folder, on every machine with a worker; or a hub name, `org/model`, downloaded by each."""
    store: str
    """URL that every worker reaches: grpc://, shards:// or shardfile://."""
    namespace: str
    corpus: str = ""
    """What the documents are filed under. Empty: made from the source's last part."""
    format: Format | None = None
    """None: by each file's suffix."""
    columns: Columns = field(default_factory=Columns)
    chunking: ChunkingConfig = field(default_factory=ChunkingConfig)
    dtype: str = ""
    """Of the model's KV: bfloat16, float16 or float32, as the serving engines run it. Empty: the
    checkpoint's, with float32 run as bfloat16, which is what vLLM does."""
    prefix_token_ids: list[int] | None = None
    """As in the engine's configuration: None is the model's BOS."""
    portable: bool = True
    codec: str = "raw"
    """How chunks are stored, by its name: as the serving engines are configured."""
    workers: int = 1
    gpus_per_worker: float = 0.0
    """Ray's accounting; below 1 several share a GPU. 0: vLLM on the CPU."""
    cpus_per_worker: float = 1.0
    batch_tokens: int = 16_384
    """Tokens per batch: what a worker that dies loses."""
    tokens_per_s_max: float = 0.0
    """Over all workers; 0: as fast as they can."""
    bytes_max: int = 0
    """KV of the corpus that may lie in the store; 0: what the store holds in all."""
    errors_share_max: float = 0.05
    """Documents that may fail before the job does."""
    replace_model: bool = False
    """Fill a second model's chunks for a corpus that has those of another; retire that one afterwards."""
    retire: bool = False
    """Forget, once this is complete, editions that another one had replaced before the job began. The one
    that was complete last stays: engines may still serve it."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`, such as max_model_len or gpu_memory_utilization."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        codec_named(self.codec)
        if is_process_local(self.store):
            raise InvalidField(
                "store",
                f"{self.store!r} lives in one process; run a shard: kintsugi store serve, grpc://host:port",
            )
        if self.corpus and not _CORPUS.fullmatch(self.corpus):
            raise InvalidField(
                "corpus", f"{self.corpus!r} must hold letters, digits and . _ - only, at most 100"
            )
        for name, least in (
            ("workers", 1),
            ("batch_tokens", 1),
            ("cpus_per_worker", 0),
            ("gpus_per_worker", 0),
        ):
            if getattr(self, name) < least:
                raise InvalidField(name, f"{getattr(self, name)} must be at least {least}")
        for name in ("tokens_per_s_max", "bytes_max"):
            if getattr(self, name) < 0:
                raise InvalidField(name, f"{getattr(self, name)} is negative; 0 means no limit")
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
        """For processes with another working folder, or on another machine."""
        folder = Path(self.model)
        is_elsewhere = not folder.is_dir() and is_hub_name(folder)
        return self.model if is_elsewhere else str(folder.resolve())

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class ModelFacts:
    """What a job has to know of a checkpoint without loading it."""

    dtype: str
    space: ChunkSpace
    layout: KVLayout
    codec: Codec

    @staticmethod
    def of(spec: JobSpec) -> ModelFacts:
        """Cost of the first call: every weight file is read once (see `models.checkpoint`), unless the model
        has a hub's name: then its small files are downloaded.

        Raises `NotFound`, `Corrupted` and `InvalidField` where the folder is no checkpoint, or chunks
        would be longer than the model's context; `NotBlendable` for a model whose chunks nobody could use;
        `Unavailable` where the hub does not answer.
        """
        folder = checkpoint_folder(spec.model, spec.engine.get("revision"))
        config = read_config(folder)
        dtype = engine_dtype(config, spec.dtype or "auto")
        layout = model_size(config, dtype).layout
        text = text_config(config)
        quantization = (config.get("quantization_config") or {}).get("quant_method")
        cache_dtype = str(spec.engine.get("kv_cache_dtype", "auto"))
        overrides = spec.engine.get("hf_overrides")
        fingerprint = model_fingerprint(
            folder,
            kv_dtype_of(dtype, cache_dtype, spec.engine.get("quantization") or quantization),
            overrides if isinstance(overrides, dict) else None,
        )
        bos = text.get("bos_token_id")
        prefix = (
            spec.prefix_token_ids
            if spec.prefix_token_ids is not None
            else [bos]
            if isinstance(bos, int)
            else []
        )
        # One token follows the chunk, and one is generated.
        longest = _positions_of(spec, text) - len(prefix) - 2
        if spec.chunking.tokens_max > longest:
            raise InvalidField(
                "chunking.tokens_max",
                f"{spec.chunking.tokens_max} exceeds the {longest} that the model reads",
            )
        space = ChunkSpace(fingerprint, spec.namespace, tuple(prefix), spec.portable)
        return ModelFacts(dtype, space, layout, codec_named(spec.codec))

    def chunk_bytes(self, num_tokens: int) -> int:
        return self.layout.chunk_bytes(self.codec, num_tokens)


def _positions_of(spec: JobSpec, text: Mapping[str, Any]) -> int:
    """Tokens that the engine reads: as it is told, else as the checkpoint says."""
    given = spec.engine.get("max_model_len")
    positions = given or text.get("max_position_embeddings") or POSITIONS_UNKNOWN
    if not isinstance(positions, int):
        field = "engine.max_model_len" if given else "max_position_embeddings"
        raise InvalidField(field, f"{positions!r} is not a number of tokens")
    return positions

"""Every name of vLLM that blending uses, so that a version without one is reported at start."""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any

from kintsugi.engine.versions import WORKING

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_UTILS = "vllm.v1.core.kv_cache_utils"


@dataclass(frozen=True)
class Hook:
    """An attribute of a vLLM module, and the purpose that fails without it."""

    module: str
    attribute: str
    purpose: str
    parameters: tuple[str, ...] = ()
    """Names of arguments that it has to accept."""

    @property
    def is_there(self) -> bool:
        """Whether vLLM has it, with those parameters. Imports the module, whatever that raises."""
        try:
            found = pkgutil.resolve_name(f"{self.module}:{self.attribute}")
        except Exception:  # noqa: BLE001 - a module that breaks while it is imported is not there either
            return False
        return _accepts(found, self.parameters)

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute} ({self.purpose})"


def _accepts(function: Any, names: tuple[str, ...]) -> bool:
    if not names:
        return True
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it is no function, or one that does not tell
        return False
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    return takes_any or set(names) <= {one.name for one in parameters}


def _connector(purpose: str, *names: str) -> tuple[Hook, ...]:
    return tuple(Hook(_BASE, f"KVConnectorBase_V1.{name}", purpose) for name in names)


def _imports(module: str, *names: str) -> tuple[Hook, ...]:
    return tuple(Hook(module, name, "importing the plugin") for name in names)


HOOKS = (
    Hook(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.register_connector",
        "registering",
    ),
    *_connector("naming blended blocks before they are looked up", "on_new_request"),
    *_connector("claiming tokens", "get_num_new_matched_tokens", "update_state_after_alloc"),
    *_connector("talking to the worker", "build_connector_meta", "build_connector_worker_meta"),
    *_connector("running slices beside engine steps", "register_kv_caches", "start_load_kv"),
    *_connector("reporting finished blends", "get_transfer_results", "update_connector_output"),
    *_connector("the accounting in responses", "request_finished"),
    *_connector("naming exact blocks", "get_handshake_metadata", "set_xfer_handshake_metadata"),
    *_connector("surviving preemption", "requires_kv_delivery"),
    *_connector("keeping blended blocks out of events", "bind_gpu_block_pool"),
    *_connector("saving discovered chunks while no request runs", "has_pending_push_work"),
    Hook("vllm.v1.core.block_pool", "BlockPool.get_new_blocks", "saving discovered chunks", ("num_blocks",)),
    Hook("vllm.v1.core.block_pool", "BlockPool.free_blocks", "saving discovered chunks"),
    Hook("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", "saving discovered chunks"),
    Hook(_BASE, "SupportsHMA.request_finished_all_groups", "models with sliding-window layers"),
    Hook(
        _BASE,
        "KVConnectorTransferResults",
        "reporting finished blends",
        ("finished_recving", "failed_recving"),
    ),
    Hook(
        "vllm.forward_context",
        "set_forward_context",
        "running decoder layers",
        ("attn_metadata", "vllm_config", "num_tokens", "slot_mapping", "skip_compiled"),
    ),
    Hook("vllm.forward_context", "get_forward_context", "running expert layers one at a time"),
    Hook("vllm.v1.request", "Request.update_block_hashes", "naming blended blocks"),
    Hook("vllm.v1.request", "Request", "naming blended blocks", ("block_hasher", "cache_salt")),
    Hook(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        "attention over the paged cache",
        (
            "query_start_loc_cpu",
            "block_table_tensor",
            "slot_mapping",
            "positions",
            "seq_lens_cpu_upper_bound",
        ),
    ),
    Hook("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", "finding cache groups"),
    Hook("vllm.v1.kv_cache_interface", "MLAAttentionSpec", "finding cache groups"),
    Hook("vllm.v1.worker.utils", "select_common_block_size", "addressing kernel blocks"),
    Hook(_UTILS, "BlockHash", "naming blended blocks"),
    Hook(_UTILS, "resolve_kv_cache_block_sizes", "naming blended blocks", ("kv_cache_config", "vllm_config")),
    Hook(
        _UTILS, "get_request_block_hasher", "proving names at start", ("hash_block_size", "caching_hash_fn")
    ),
    Hook(_UTILS, "resolve_block_hashes", "keeping blended blocks out of events"),
    Hook(_UTILS, "maybe_convert_block_hash", "keeping blended blocks out of events"),
    Hook("vllm.v1.core.block_pool", "BlockPool.cache_full_blocks", "keeping blended blocks out of events"),
    Hook(
        "vllm.v1.core.block_pool",
        "BlockPool.emit_cached_block_events",
        "keeping blended blocks out of events",
    ),
    Hook(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        "proving names at start",
        ("kv_cache_config", "max_model_len", "scheduler_block_size", "hash_block_size", "enable_caching"),
    ),
    Hook(_UTILS, "init_none_hash", "proving names at start"),
    Hook("vllm.utils.hashing", "get_hash_fn_by_name", "proving names at start"),
    Hook("vllm.distributed.kv_events", "BlockStored", "keeping blended blocks out of events"),
    *_imports("vllm", "SamplingParams", "__version__"),
    *_imports("vllm.config", "CUDAGraphMode", "ModelConfig", "VllmConfig"),
    *_imports(
        "vllm.distributed",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "get_tp_group",
        "tensor_model_parallel_all_gather",
        "tensor_model_parallel_all_reduce",
    ),
    *_imports(
        _BASE,
        "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorWorkerMetadata",
    ),
    *_imports(
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorPromMetrics", "KVConnectorStats"
    ),
    *_imports("vllm.logger", "init_logger"),
    *_imports("vllm.model_executor.custom_op", "CustomOp"),
    *_imports(
        "vllm.v1.kv_cache_interface",
        "AttentionSpec",
        "FullAttentionSpec",
        "KVCacheConfig",
        "KVCacheSpec",
        "MambaSpec",
    ),
    *_imports("vllm.v1.request", "RequestStatus"),
)


def find_missing_hooks() -> list[Hook]:
    """The hooks that this vLLM lacks. Imports vLLM, which takes seconds the first time."""
    return [hook for hook in HOOKS if not hook.is_there]


def describe_missing() -> str | None:
    """Why this vLLM cannot blend, and which can, as `reason: detail`; None where it can."""
    missing = find_missing_hooks()
    if not missing:
        return None
    return f"vllm_version: this vLLM lacks {', '.join(map(str, missing))}. {WORKING}"

"""Every name of vLLM that the plugin uses, so that a version without one is reported at start."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


@dataclass(frozen=True)
class Hook:
    """An attribute of a vLLM module, and the purpose that fails without it."""

    module: str
    attribute: str
    purpose: str

    @property
    def is_there(self) -> bool:
        """Whether vLLM has it. Imports the module."""
        try:
            pkgutil.resolve_name(f"{self.module}:{self.attribute}")
        except (ImportError, AttributeError):
            return False
        return True

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute} ({self.purpose})"


def _connector(purpose: str, *names: str) -> tuple[Hook, ...]:
    return tuple(Hook(_BASE, f"KVConnectorBase_V1.{name}", purpose) for name in names)


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
    *_connector("surviving preemption", "requires_kv_delivery"),
    Hook(_BASE, "SupportsHMA.request_finished_all_groups", "models with sliding-window layers"),
    Hook(_BASE, "KVConnectorTransferResults", "reporting finished blends"),
    Hook("vllm.forward_context", "set_forward_context", "running decoder layers"),
    Hook("vllm.forward_context", "get_forward_context", "running expert layers one at a time"),
    Hook("vllm.v1.request", "Request.update_block_hashes", "naming blended blocks"),
    Hook("vllm.v1.attention.backend", "CommonAttentionMetadata", "attention over the paged cache"),
    Hook("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", "finding cache groups"),
    Hook("vllm.v1.worker.utils", "select_common_block_size", "addressing kernel blocks"),
    Hook("vllm.v1.core.kv_cache_utils", "BlockHash", "naming blended blocks"),
)


def find_missing_hooks() -> list[Hook]:
    """The hooks that this vLLM lacks. Imports vLLM, which takes seconds the first time."""
    return [hook for hook in HOOKS if not hook.is_there]

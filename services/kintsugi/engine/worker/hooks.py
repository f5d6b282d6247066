"""Every name of vLLM that Kintsugi uses, so that a version without one is reported at start.

Without one of `HOOKS` nothing is blended, without one of `OPENAI_HOOKS` OpenAI's routes are closed, and
without one of the others what needs it does not start. Each says so, and which versions work.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kintsugi.core.errors import Unavailable, VersionMismatch
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
    former_module: str = ""
    """Where versions that work have it, too; empty: nowhere else."""

    @property
    def is_there(self) -> bool:
        """Whether vLLM has it, with those parameters. Imports the module, whatever that raises."""
        return any(self._is_in(module) for module in (self.module, self.former_module) if module)

    def _is_in(self, module: str) -> bool:
        try:
            found = pkgutil.resolve_name(f"{module}:{self.attribute}")
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


def _starting(module: str, *names: str) -> tuple[Hook, ...]:
    return tuple(Hook(module, name, "starting an engine") for name in names)


ENGINE_HOOKS = (
    *_starting("vllm", "SamplingParams", "TokensPrompt"),
    *_starting("vllm.config", "KVTransferConfig"),
    *_starting("vllm.engine.arg_utils", "AsyncEngineArgs.create_engine_config"),
    *_starting("vllm.platforms", "current_platform"),
    *_starting("vllm.sampling_params", "RequestOutputKind"),
    *_starting("vllm.usage.usage_lib", "UsageContext"),
    *_starting("vllm.v1.engine.async_llm", "AsyncLLM.from_vllm_config"),
    *_starting("vllm.v1.metrics.loggers", "AggregateStatLoggerBase.record"),
    *_starting("vllm.v1.metrics.prometheus", "get_prometheus_registry"),
)
"""What any engine needs, whether it blends or not."""

LOCAL_HOOKS = _starting("vllm", "LLM")
"""What `engine.local` needs beside them."""

FORCING_HOOKS = tuple(
    Hook("vllm.v1.sample.logits_processor", name, "forcing answers")
    for name in ("AdapterLogitsProcessor", "RequestLogitsProcessor")
)
"""What `engine.forcing` needs, which calibration loads."""

_CHAT, _COMPLETION = "vllm.entrypoints.openai.chat_completion", "vllm.entrypoints.openai.completion"
_RESPONSES = "vllm.entrypoints.openai.responses"
_TEMPLATES = ("request_logger", "chat_template", "chat_template_content_format")
_PARSERS = ("tool_parser", "enable_auto_tools", "reasoning_parser")
_DETAILS = ("enable_prompt_tokens_details", "online_renderer")


def _openai(module: str, attribute: str, *parameters: str, former_module: str = "") -> Hook:
    return Hook(module, attribute, "OpenAI's routes", parameters, former_module)


OPENAI_HOOKS = (
    _openai(f"{_CHAT}.protocol", "ChatCompletionRequest.build_tok_params"),
    _openai(f"{_CHAT}.protocol", "ChatCompletionRequest.to_sampling_params"),
    _openai(f"{_CHAT}.serving", "OpenAIServingChat", *_TEMPLATES, *_PARSERS, *_DETAILS),
    _openai(f"{_CHAT}.serving", "OpenAIServingChat.create_chat_completion"),
    _openai(f"{_CHAT}.serving", "OpenAIServingChat.chat_completion_stream_generator"),
    _openai(f"{_COMPLETION}.protocol", "CompletionRequest.build_tok_params"),
    _openai(f"{_COMPLETION}.protocol", "CompletionRequest.to_sampling_params"),
    _openai(f"{_COMPLETION}.serving", "OpenAIServingCompletion", "request_logger", *_DETAILS),
    _openai(f"{_COMPLETION}.serving", "OpenAIServingCompletion.create_completion"),
    _openai(f"{_COMPLETION}.serving", "OpenAIServingCompletion.completion_stream_generator"),
    _openai(f"{_RESPONSES}.protocol", "ResponsesRequest.build_tok_params"),
    _openai(f"{_RESPONSES}.protocol", "ResponsesRequest.to_sampling_params"),
    _openai(f"{_RESPONSES}.serving", "OpenAIServingResponses", *_TEMPLATES, *_PARSERS, *_DETAILS),
    _openai(f"{_RESPONSES}.serving", "OpenAIServingResponses.create_responses"),
    _openai(f"{_RESPONSES}.serving", "OpenAIServingResponses.responses_stream_generator"),
    _openai(f"{_RESPONSES}.serving", "OpenAIServingResponses.create_streaming_error_response"),
    _openai(f"{_RESPONSES}.serving", "OpenAIServingResponses._check_model"),
    _openai("vllm.renderers.online_renderer", "OnlineRenderer.render_responses"),
    _openai("vllm.entrypoints.openai.models.protocol", "BaseModelPath", "name", "model_path"),
    _openai("vllm.entrypoints.openai.models.serving", "OpenAIServingModels"),
    _openai("vllm.entrypoints.serve", "create_error_response"),
    _openai("vllm.renderers", "TokenizeParams"),
    _openai("vllm.renderers.base", "BaseRenderer._build_tokens_prompt"),
    _openai("vllm.renderers.chat_utils", "load_chat_template", former_module="vllm.entrypoints.chat_utils"),
    _openai("vllm.renderers.hf", "resolve_chat_template", "chat_template", "tools", "model_config"),
    _openai(
        "vllm.renderers.online_renderer",
        "OnlineRenderer",
        "model_config",
        "renderer",
        *_TEMPLATES,
        *_PARSERS,
    ),
    _openai("vllm.utils.async_utils", "make_async", "executor"),
    _openai("vllm.v1.engine.exceptions", "EngineDeadError"),
)
"""What `engine.openai` needs beside `ENGINE_HOOKS`."""

ALL_HOOKS = (*HOOKS, *ENGINE_HOOKS, *LOCAL_HOOKS, *FORCING_HOOKS, *OPENAI_HOOKS)


def find_missing_hooks(hooks: Sequence[Hook] = HOOKS) -> list[Hook]:
    """Those that this vLLM lacks. Imports vLLM, which takes seconds the first time."""
    return [hook for hook in hooks if not hook.is_there]


def describe_missing(hooks: Sequence[Hook] = HOOKS) -> str | None:
    """What of `hooks` this vLLM lacks and which versions work, as `reason: detail`; None where it has all."""
    missing = find_missing_hooks(hooks)
    if not missing:
        return None
    return f"vllm_version: this vLLM lacks {', '.join(map(str, missing))}. {WORKING}"


def check_vllm(hooks: Sequence[Hook]) -> None:
    """Raises `Unavailable` without vLLM, and `VersionMismatch` with what it lacks and which versions work."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise Unavailable(
            f"vLLM cannot be imported ({error}); "
            "install kintsugi-kv[gpu], or without a GPU [cpu] as docs/howto/install.md says"
        ) from error
    missing = describe_missing(hooks)
    if missing is not None:
        raise VersionMismatch(missing)

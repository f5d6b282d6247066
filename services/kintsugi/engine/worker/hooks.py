"""Every name of vLLM that Kintsugi uses, so that a version without one is reported at start.

An engine on a vLLM without one of them does not start, and the error names what is missing and the versions
that work.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kintsugi.core.errors import Unavailable, VersionMismatch
from kintsugi.engine.versions import WORKING


@dataclass(frozen=True)
class Hook:
    """An attribute of a vLLM module."""

    modules: tuple[str, ...]
    """The module, then its former names in versions that work."""
    attribute: str
    purpose: str
    """What fails without it."""
    parameters: tuple[str, ...] = ()
    """Names of arguments that it must accept."""

    @property
    def exists(self) -> bool:
        """Whether vLLM has the attribute, with those parameters. Imports the module; never raises."""
        return any(self._is_in(module) for module in self.modules)

    def _is_in(self, module: str) -> bool:
        try:
            found = pkgutil.resolve_name(f"{module}:{self.attribute}")
        except Exception:  # noqa: BLE001 - a module that fails to import lacks the attribute, too
            return False
        return _accepts(found, self.parameters)

    def __str__(self) -> str:
        return f"{self.modules[0]}.{self.attribute} ({self.purpose})"


def _accepts(function: Any, names: tuple[str, ...]) -> bool:
    if not names:
        return True
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not a function, or one without a readable signature
        return False
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    return takes_any or set(names) <= {one.name for one in parameters}


def _read_hooks(purpose: str, table: str) -> tuple[Hook, ...]:
    """Read a table of lines ``module | former module: attribute attribute(parameter, parameter)``."""
    hooks = []
    for line in table.strip().splitlines():
        modules, _, attributes = line.partition(": ")
        for attribute, parameters in re.findall(r"([\w.]+)(?:\(([^)]*)\))?", attributes):
            accepted = tuple(re.findall(r"\w+", parameters))
            hooks.append(Hook(tuple(re.findall(r"[\w.]+", modules)), attribute, purpose, accepted))
    return tuple(hooks)


_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"

HOOKS = _read_hooks(
    "blending",
    f"""
{_CONNECTOR}.factory: KVConnectorFactory.register_connector
{_CONNECTOR}.v1.base: KVConnectorHandshakeMetadata KVConnectorMetadata KVConnectorWorkerMetadata
{_CONNECTOR}.v1.base: KVConnectorTransferResults(finished_recving, failed_recving) KVConnectorRole
{_CONNECTOR}.v1.base: KVConnectorBase_V1.on_new_request KVConnectorBase_V1.get_num_new_matched_tokens
{_CONNECTOR}.v1.base: KVConnectorBase_V1.update_state_after_alloc KVConnectorBase_V1.build_connector_meta
{_CONNECTOR}.v1.base: KVConnectorBase_V1.build_connector_worker_meta KVConnectorBase_V1.start_load_kv
{_CONNECTOR}.v1.base: KVConnectorBase_V1.register_kv_caches KVConnectorBase_V1.get_transfer_results
{_CONNECTOR}.v1.base: KVConnectorBase_V1.update_connector_output KVConnectorBase_V1.request_finished
{_CONNECTOR}.v1.base: KVConnectorBase_V1.get_handshake_metadata KVConnectorBase_V1.bind_gpu_block_pool
{_CONNECTOR}.v1.base: KVConnectorBase_V1.set_xfer_handshake_metadata KVConnectorBase_V1.requires_kv_delivery
{_CONNECTOR}.v1.base: KVConnectorBase_V1.has_pending_push_work SupportsHMA.request_finished_all_groups
{_CONNECTOR}.v1.metrics: KVConnectorPromMetrics KVConnectorStats
vllm: SamplingParams __version__
vllm.config: CacheConfig CUDAGraphMode ModelConfig VllmConfig
vllm.distributed: get_tensor_model_parallel_rank get_tensor_model_parallel_world_size get_tp_group
vllm.distributed: tensor_model_parallel_all_gather tensor_model_parallel_all_reduce
vllm.distributed.kv_events: BlockStored
vllm.forward_context: get_forward_context
vllm.forward_context: set_forward_context(attn_metadata, vllm_config, num_tokens, slot_mapping, skip_compiled)
vllm.logger: init_logger
vllm.model_executor.custom_op: CustomOp
vllm.platforms: current_platform
vllm.utils.hashing: get_hash_fn_by_name
vllm.v1.attention.backend: CommonAttentionMetadata(query_start_loc_cpu, block_table_tensor, slot_mapping)
vllm.v1.attention.backend: CommonAttentionMetadata(positions, seq_lens_cpu_upper_bound)
vllm.v1.core.block_pool: BlockPool.cache_full_blocks BlockPool.emit_cached_block_events
vllm.v1.core.block_pool: BlockPool.free_blocks BlockPool.get_new_blocks(num_blocks)
vllm.v1.core.block_pool: BlockPool.get_num_free_blocks BlockPool.evict_blocks BlockPool.reset_prefix_cache
vllm.v1.core.kv_cache_manager: KVCacheManager(kv_cache_config, max_model_len, scheduler_block_size)
vllm.v1.core.kv_cache_manager: KVCacheManager(hash_block_size, enable_caching)
vllm.v1.core.kv_cache_utils: BlockHash init_none_hash maybe_convert_block_hash resolve_block_hashes
vllm.v1.core.kv_cache_utils: get_request_block_hasher(hash_block_size, caching_hash_fn)
vllm.v1.core.kv_cache_utils: resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
vllm.v1.kv_cache_interface: AttentionSpec FullAttentionSpec KVCacheConfig KVCacheSpec MLAAttentionSpec
vllm.v1.kv_cache_interface: MambaSpec UniformTypeKVCacheSpecs
vllm.v1.request: Request(block_hasher, cache_salt) Request.update_block_hashes RequestStatus
vllm.v1.worker.utils: select_common_block_size
""",
)

ENGINE_HOOKS = _read_hooks(
    "starting an engine",
    """
vllm: SamplingParams TokensPrompt
vllm.config: KVTransferConfig
vllm.engine.arg_utils: AsyncEngineArgs.create_engine_config
vllm: __version__
vllm.platforms: current_platform
vllm.sampling_params: RequestOutputKind
vllm.usage.usage_lib: UsageContext
vllm.v1.engine.async_llm: AsyncLLM.from_vllm_config
vllm.v1.metrics.loggers: AggregateStatLoggerBase.record
vllm.v1.metrics.prometheus: get_prometheus_registry
""",
)
"""Names that every engine needs, whether it blends or not."""

LOCAL_HOOKS = _read_hooks("starting an engine", "vllm: LLM")
"""Names that `engine.local` needs in addition."""

_ARGUMENTS = "chat_template, chat_template_content_format, tool_parser, enable_auto_tools, reasoning_parser"
_DETAILS = "request_logger, enable_prompt_tokens_details, online_renderer"
_OPENAI = "vllm.entrypoints.openai"

OPENAI_HOOKS = _read_hooks(
    "OpenAI's routes",
    f"""
{_OPENAI}.chat_completion.protocol: ChatCompletionRequest.build_tok_params
{_OPENAI}.chat_completion.protocol: ChatCompletionRequest.to_sampling_params
{_OPENAI}.chat_completion.serving: OpenAIServingChat({_ARGUMENTS}, {_DETAILS})
{_OPENAI}.chat_completion.serving: OpenAIServingChat.create_chat_completion
{_OPENAI}.chat_completion.serving: OpenAIServingChat.chat_completion_stream_generator
{_OPENAI}.completion.protocol: CompletionRequest.build_tok_params CompletionRequest.to_sampling_params
{_OPENAI}.completion.serving: OpenAIServingCompletion({_DETAILS}) OpenAIServingCompletion.create_completion
{_OPENAI}.completion.serving: OpenAIServingCompletion.completion_stream_generator
{_OPENAI}.models.protocol: BaseModelPath(name, model_path)
{_OPENAI}.models.serving: OpenAIServingModels
{_OPENAI}.responses.protocol: ResponsesRequest.build_tok_params ResponsesRequest.to_sampling_params
{_OPENAI}.responses.serving: OpenAIServingResponses({_ARGUMENTS}, {_DETAILS})
{_OPENAI}.responses.serving: OpenAIServingResponses.create_responses
{_OPENAI}.responses.serving: OpenAIServingResponses.responses_stream_generator
{_OPENAI}.responses.serving: OpenAIServingResponses.create_streaming_error_response
{_OPENAI}.responses.serving: OpenAIServingResponses._check_model
vllm.entrypoints.serve: create_error_response
vllm.renderers: TokenizeParams
vllm.renderers.base: BaseRenderer._build_tokens_prompt
vllm.renderers.chat_utils | vllm.entrypoints.chat_utils: load_chat_template
vllm.renderers.hf: resolve_chat_template(chat_template, tools, model_config)
vllm.renderers.online_renderer: OnlineRenderer(model_config, renderer, request_logger, {_ARGUMENTS})
vllm.renderers.online_renderer: OnlineRenderer.render_responses
vllm.utils.async_utils: make_async(executor)
vllm.v1.engine.exceptions: EngineDeadError
""",
)
"""Names that `engine.openai` needs in addition to `ENGINE_HOOKS`."""

ALL_HOOKS = (*HOOKS, *ENGINE_HOOKS, *LOCAL_HOOKS, *OPENAI_HOOKS)


def find_missing_hooks(hooks: Sequence[Hook] = HOOKS) -> list[Hook]:
    """Return the hooks that this vLLM lacks. Imports vLLM, which takes seconds the first time."""
    return [hook for hook in hooks if not hook.exists]


def check_vllm(hooks: Sequence[Hook]) -> None:
    """Raise `Unavailable` without vLLM, and `VersionMismatch` if it lacks one of the hooks."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise Unavailable(
            f"vLLM cannot be imported ({error}); "
            "install kintsugi-kv[gpu], or without a GPU [cpu] as docs/howto/install.md says"
        ) from error
    missing = find_missing_hooks(hooks)
    if missing:
        raise VersionMismatch(f"this vLLM lacks {', '.join(map(str, missing))}. {WORKING}")

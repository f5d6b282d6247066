"""The vLLM connector that blends: a thin shell around `SchedulerSide` and `WorkerSide`.

vLLM creates one object per role; methods are grouped by role. Requests are claimed asynchronously
(`get_num_new_matched_tokens` returns `(n, True)`): vLLM parks them, leaves their blocks unnamed, and calls
`start_load_kv` in every step, in which the worker runs a slice. Model Runner V2, the default on CUDA, calls
it after the step's forward pass and sampling; V1 and the CPU engine call it before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig

from kintsugi.core.accounting import TOLD
from kintsugi.core.errors import InvalidField, SelfTestFailed
from kintsugi.core.schema import load
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.plugin import end_with_parent
from kintsugi.engine.protocol import WorkerFacts
from kintsugi.engine.scheduler.discovery import Discovery, IdleSaves, load_token_classes
from kintsugi.engine.scheduler.events import announce_exact_only
from kintsugi.engine.scheduler.gate import binding_of, open_gate, prefix_of
from kintsugi.engine.scheduler.hashing import Salts
from kintsugi.engine.scheduler.requests import Parking
from kintsugi.engine.scheduler.resets import give_up_on_reset
from kintsugi.engine.scheduler.selftest import check_names
from kintsugi.engine.scheduler.side import SchedulerSide
from kintsugi.engine.scheduler.stats import BlendPromMetrics, BlendStats
from kintsugi.engine.worker.side import PASSES_MAX, WorkerSide
from kintsugi.engine.worker.support import (
    find_chunk_reach,
    find_local_chunk,
    find_unsupported,
    find_wrapper,
    has_windows,
)
from kintsugi.fusor.control.controller import LoadingController, Planner
from kintsugi.fusor.control.forecast import EngineShape
from kintsugi.store.client.registry import is_process_local, open_store

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class KintsugiConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector's object of one role. `MultiConnector` finds its statistics by the class's name."""

    _scheduler: SchedulerSide
    """Only in the scheduler's role."""
    _worker: WorkerSide
    """Only in the worker's role."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise InvalidField(
                "kv_load_failure_policy",
                f"{transfer.kv_load_failure_policy!r} fails a request whose chunks cannot be loaded; "
                "set 'recompute'",
            )
        config = load(EngineConfig, transfer.kv_connector_extra_config, "kv_connector_extra_config")
        if (
            is_process_local(config.store)
            and vllm_config.parallel_config.distributed_executor_backend != "uni"
        ):
            raise InvalidField(
                "store",
                f"{config.store!r} lives in one process, and this engine's worker runs in another; run a "
                "shard (kintsugi store serve) and name it: grpc://host:port",
            )
        store = open_store(config.store)
        # Blends compute at most half as many tokens per step as a prefill, so a decode waits no longer for a
        # blend than for a prefill.
        slice_tokens = max(1, vllm_config.scheduler_config.max_num_batched_tokens // 2)
        if role is KVConnectorRole.SCHEDULER:
            end_with_parent()
            binding = binding_of(vllm_config, config)
            salts = Salts(store).start()
            discovery = Discovery(config.discovery_namespace, salts, partial(load_token_classes, vllm_config))
            self._scheduler = SchedulerSide(
                config=config,
                store=store,
                planner=_planner_of(config),
                gate=open_gate(config, store, binding),
                salts=salts,
                fingerprint=binding.model,
                prefix_token_ids=prefix_of(config, vllm_config),
                hash_block_size=resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1],
                declined_because=(
                    find_unsupported(vllm_config)
                    or find_wrapper(self)
                    or _find_misnaming(vllm_config, kv_cache_config, config)
                ),
                engine=_engine_of(vllm_config),
                parking=_parking_of(vllm_config, kv_cache_config),
                discovery=discovery,
                idle_saves=IdleSaves(
                    discovery,
                    config,
                    _block_sizes(kv_cache_config),
                    find_chunk_reach(vllm_config, kv_cache_config),
                ),
                is_consumer=transfer.kv_role == "kv_consumer",
                num_ranks=vllm_config.parallel_config.tensor_parallel_size,
                has_windows=has_windows(kv_cache_config),
                local_chunk=find_local_chunk(kv_cache_config),
                caches_prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
            )
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, config, store, slice_tokens)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped blend costs no more than a prefill."""
        return False

    # Scheduler role

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Store the workers' facts. Called once, after every worker's `register_kv_caches`."""
        facts = [one for one in metadata.values() if isinstance(one, WorkerFacts)]
        side = self._scheduler
        side.restores_keys = all(one.restores_keys for one in facts)
        side.engine = replace(
            side.engine,
            sees_order_alone=all(one.sees_order_alone for one in facts),
            attending=facts[0].attending if facts else None,
        )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if gpu_block_pool.enable_kv_cache_events:
            announce_exact_only(gpu_block_pool)
        self._scheduler.idle_saves.pool = gpu_block_pool
        give_up_on_reset(gpu_block_pool, self._scheduler.give_up_parked)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.begin_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update(connector_output.kv_connector_worker_meta)

    def has_pending_push_work(self) -> bool:
        """Whether vLLM should keep stepping without requests, to save discovered segments."""
        return self._scheduler.declined_because is None and self._scheduler.idle_saves.is_pending

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.request_finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.request_finished(request)

    def reset_cache(self) -> bool:
        """Do nothing: chunks stay valid until the weights change, which the worker detects. vLLM also calls
        this for plain resets, and not for every weight update."""
        return True

    # Worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> WorkerFacts | None:
        return self._worker.facts()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.step(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: the batch contains no request whose KV is not loaded yet."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the save pass captures chunks before RoPE."""

    def wait_for_save(self) -> None:
        """Do nothing: a save is reported finished after its chunk is committed."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.take_finished()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report()

    # Both roles

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """End the step: vLLM calls this at the end of every step."""
        return self._scheduler.end_step() if self.role is KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        # For vLLM's log line, which a service may never write: the accountings would accumulate until then.
        return BlendStats(data={name: amount for name, amount in (data or {}).items() if name != TOLD})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return BlendPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        (self._scheduler if self.role is KVConnectorRole.SCHEDULER else self._worker).close()


PROJECTION_SHARE_FIRST = 0.25
"""Projection share until the worker reports the model's."""


def _planner_of(config: EngineConfig) -> Planner:
    if config.loading_controller:
        return LoadingController(config.selection)
    return Planner(config.selection)


def _find_misnaming(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: EngineConfig
) -> str | None:
    """Run the self-test of block names. Returns `reason: detail` if it fails, else None."""
    if not config.self_test or not vllm_config.cache_config.enable_prefix_caching:
        return None
    try:
        check_names(vllm_config, kv_cache_config)
    except SelfTestFailed as failed:
        reason = f"self_test_failed: {failed}"
    except Exception as defect:
        logger.exception("The self-test of names failed because of a defect")
        reason = f"self_test_failed: check 'names': {type(defect).__name__}: {defect}"
    else:
        return None
    logger.error("Blending is off, every prompt is prefilled in full: %s", reason)
    return reason


def _engine_of(vllm_config: VllmConfig) -> EngineShape:
    return EngineShape(
        num_layers=vllm_config.model_config.get_total_num_hidden_layers(),
        projection_share=PROJECTION_SHARE_FIRST,
        step_tokens_max=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def _parking_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Parking:
    """Return the places for parked blends: one for each blend that the worker runs at a time, at most
    `max_num_seqs`."""
    blocks_per_token = sum(1 / size for size in _block_sizes(kv_cache_config))
    return Parking(
        places=min(PASSES_MAX, vllm_config.scheduler_config.max_num_seqs),
        cache_tokens=int(kv_cache_config.num_blocks / blocks_per_token),
    )


def _block_sizes(kv_cache_config: KVCacheConfig) -> list[int]:
    """Return the tokens per block of each group."""
    return [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]

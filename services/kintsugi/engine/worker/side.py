"""The worker's side of the connector: runs blend and save passes in a bounded slice per engine step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from kintsugi.core.accounting import CACHE_RESET, WEIGHTS_CHANGED, Accounting, Outcome
from kintsugi.core.errors import KintsugiError, NotBlendable, NotFound, SelfTestFailed
from kintsugi.core.layout import ChunkManifest, Codec, HeadRange, codec_named
from kintsugi.core.plan import BlendPlan
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.protocol import (
    BlendJob,
    JobTokens,
    LoadSample,
    PassSample,
    ProbeJob,
    SaveJob,
    StepMetadata,
    WorkerFacts,
    WorkerReport,
)
from kintsugi.engine.worker.anatomy import learn_model
from kintsugi.engine.worker.defects import begin_on_all_ranks, contain_defects
from kintsugi.engine.worker.memory import describe_refusal, pass_bytes, reserve_memory, warn_of_short_memory
from kintsugi.engine.worker.model import LoadedModel, find_layers
from kintsugi.engine.worker.ranks import is_first_rank, is_so_on_any_rank, rank_and_size
from kintsugi.engine.worker.saves import IdleSavePasses, SaveBatch, num_saves_together, outcome_of
from kintsugi.engine.worker.selftest import self_test
from kintsugi.engine.worker.stack import VllmStack
from kintsugi.engine.worker.streams import STORE_SHARE, read_and_drop, stream_chunks
from kintsugi.engine.worker.support import find_foreign, find_unsupported
from kintsugi.engine.worker.weights import LoadedWeights
from kintsugi.fusor.audit import measure_errors
from kintsugi.fusor.blend import BlendPass, PassRegion
from kintsugi.fusor.control.estimates import Meter
from kintsugi.fusor.loader import PREFETCH_LAYERS, Frames, LayerLoader, placements_of
from kintsugi.fusor.save import SaveItem, SavePass
from kintsugi.fusor.selectors import depends_on_question
from kintsugi.fusor.sliced import PassStatus
from kintsugi.store.protocol.interface import ChunkStore

logger = init_logger(__name__)

PASSES_MAX = 8
"""Maximum number of blends that load or compute at a time. Waiting blends hold no threads, leases or
memory."""


@dataclass
class _Blend:
    """A blend in flight."""

    job: BlendJob
    work: BlendPass
    meters: list[Meter]
    """Meters of the first plan's streams."""
    bytes_max: int
    """Maximum device memory that the pass holds."""
    advanced_s: float = 0.0
    """Time in slices, including waiting for layers."""


class WorkerSide:
    """Runs all passes in flight. Called once per engine step, from the worker's thread."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: EngineConfig,
        store: ChunkStore,
        slice_tokens: int,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._store = store
        self._slice_tokens = slice_tokens
        self._codec = codec_named(config.codec)
        self._unit_tokens_max = vllm_config.scheduler_config.max_num_batched_tokens
        self._model: LoadedModel | None = None
        self._room_bytes: float | None = None
        """Reserved device memory that the passes in flight leave free; None before the first pass."""
        self._weights: LoadedWeights | None = None
        self._unable: str | None = None
        self._unable_is_told = False
        self._blends_waiting: list[BlendJob] = []
        self._blends: dict[str, _Blend] = {}
        self._saves_waiting: list[SaveJob] = []
        self._save: SaveBatch | None = None
        self._puts: dict[str, Future[Accounting]] = {}
        """Running puts of chunks, and running audits, by request id."""
        self._puts_without_kv: set[str] = set()
        """Ids in `_puts` whose cache blocks have lost their content meanwhile."""
        self._put_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kintsugi-put")
        self._idle_saves = IdleSavePasses(
            self._save_pass, self._put, self._put_threads, is_first_rank, self._has_stopped
        )
        self._probe_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kintsugi-probe")
        self._probe: Future[LoadSample] | None = None
        self._passes: dict[str, PassSample] = {}
        self._loads: list[LoadSample] = []
        self._finished: dict[str, Accounting] = {}
        self._without_kv: set[str] = set()
        """Finished requests that vLLM must compute. Excludes saves that failed only to store."""
        self._released: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the model of the caches and check that its blends are correct. Never raises for a model that
        cannot be blended: the engine serves, and every response states the reason."""
        self._unable = find_unsupported(self._vllm_config)
        if self._unable is not None:
            logger.warning("Blending is off, every prompt is prefilled in full: %s", self._unable)
            return
        if self._try_on_all_ranks(partial(self._learn, kv_caches)) and self._try_on_all_ranks(self._test):
            assert self._model is not None
            warn_of_short_memory(self._model)

    def _try_on_all_ranks(self, act: Callable[[], None]) -> bool:
        """Call ``act``, and turn blending off on every rank if it fails on one: a rank alone in a layer would
        wait for the others forever. Returns whether blending is on."""
        try:
            act()
        except (NotBlendable, SelfTestFailed) as error:
            self._turn_off(str(error) if isinstance(error, NotBlendable) else f"self_test_failed: {error}")
        except Exception as defect:
            self._unable = f"self_test_failed: {type(defect).__name__}: {defect}"
            logger.exception("Blending is off, every prompt is prefilled in full: the self-test broke")
        if is_so_on_any_rank(self._unable is not None) and self._unable is None:
            self._turn_off("other_rank: blending is off on another tensor-parallel rank, whose log says why")
        return self._unable is None

    def _turn_off(self, reason: str) -> None:
        self._unable, self._unable_is_told = reason, False
        logger.error("Blending is off, every prompt is prefilled in full: %s", reason)

    def _learn(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._model = learn_model(find_layers(self._vllm_config, self._kv_cache_config, kv_caches))
        self._codec = self._stored_codec(self._model)

    def _test(self) -> None:
        assert self._model is not None
        if self._config.self_test:
            self_test(self._model)
        self._weights = LoadedWeights(self._model.root, self._model.device)

    def _stored_codec(self, model: LoadedModel) -> Codec:
        """Return the configured codec, or raw if it cannot encode some layer of the model."""
        if model.layout.holds(self._codec):
            return self._codec
        logger.warning("Chunks are stored raw, because %s only encodes K and V", self._codec.name.lower())
        return Codec.RAW

    def facts(self) -> WorkerFacts | None:
        """Return the facts that the scheduler's side needs; None if the model is not blended."""
        if self._model is None:
            return None
        is_restored = all(layer.rotation.is_restored for layer in self._model.layers)
        return WorkerFacts(is_restored, self._model.sees_order_alone, self._model.attending)

    def step(self, metadata: StepMetadata) -> None:
        """Accept new work, then run passes until this step's share of work is done.

        Without work, as in every step of a request that is not blended, this costs a few microseconds.
        """
        if metadata.is_empty and not self._has_work:
            return
        with torch.inference_mode():
            for request_id in metadata.cancelled:
                self._cancel(request_id)
            if metadata.cache_is_reset:
                self._give_up_everything(f"{CACHE_RESET}: vLLM emptied its cache during the pass")
                self._puts_without_kv = set(self._puts)
            self._check_weights(metadata)
            self._accept(metadata)
            self._collect_puts()
            self._collect_probe()
            self._advance(metadata.prefills)
            self._advance_idle_saves(metadata)

    @property
    def _has_work(self) -> bool:
        return bool(self._has_passes or self._puts or self._probe is not None)

    @property
    def _has_passes(self) -> bool:
        """Whether requests wait for passes that run or have not begun."""
        return bool(self._blends or self._blends_waiting or self._save is not None or self._saves_waiting)

    def take_finished(self) -> KVConnectorTransferResults:
        """Return the ids of requests that are done, and the ids among them without KV."""
        done = self._released | set(self._finished)
        return KVConnectorTransferResults(finished_recving=done, failed_recving=set(self._without_kv))

    def take_report(self) -> WorkerReport | None:
        """Return the report since the last call, after `take_finished`; None if nothing happened."""
        told = self._unable_is_told or self._unable is None
        self._unable_is_told = True
        finished, self._finished, self._released, self._without_kv = self._finished, {}, set(), set()
        passes, self._passes = self._passes, {}
        loads, self._loads = self._loads, []
        discovered = self._idle_saves.take_outcomes()
        if not finished and not loads and not discovered and told:
            return None
        return WorkerReport(finished, self._unable, passes, loads, discovered)

    def close(self) -> None:
        for blend in self._blends.values():
            blend.work.close()
        self._blends.clear()
        self._idle_saves.close()
        if self._weights is not None:
            self._weights.close()
        self._probe_thread.shutdown(wait=False, cancel_futures=True)
        self._put_threads.shutdown(wait=True, cancel_futures=True)

    def _stack(self, tokens: Sequence[JobTokens], beyond: int = 0) -> VllmStack:
        """Make the stack of a pass over these sequences; ``beyond`` as in `VllmStack`."""
        assert self._model is not None
        before_end = None if self._weights is None else self._weights.look
        starts, ends = [one.start for one in tokens], [one.start + len(one.token_ids) for one in tokens]
        blocks = [one.block_ids for one in tokens]
        return VllmStack(self._model, blocks, ends, before_end, starts=starts, beyond=beyond)

    def _begin_blend(self, job: BlendJob, bytes_max: int) -> _Blend:
        end = job.tokens.start + len(job.tokens.token_ids)
        token_ids = torch.tensor(job.tokens.token_ids, dtype=torch.int64)
        meters: list[list[Meter]] = []

        def open_loader(plan: BlendPlan) -> LayerLoader:
            meters.append([])
            return self._open_loader(job, plan, end, meters[-1])

        work = BlendPass(
            region=PassRegion(token_ids, job.tokens.start, job.next_token_id),
            plan=job.plan,
            # The last token, which vLLM computes, is part of the question's pass.
            stack=self._stack([job.tokens], beyond=int(depends_on_question(job.plan.selection))),
            open_loader=open_loader,
            unit_tokens_max=self._unit_tokens_max,
            explain=job.explain,
        )
        return _Blend(job, work, meters[0], bytes_max)

    def _open_loader(self, job: BlendJob, plan: BlendPlan, end: int, meters: list[Meter]) -> LayerLoader:
        assert self._model is not None
        rank, world_size = rank_and_size()
        placements = placements_of(plan, job.manifests, job.tokens.start, end)
        manifests = [placement.manifest for placement in placements]
        layout = manifests[0].layout
        heads = HeadRange.of_rank(layout.num_kv_heads, rank, world_size)
        deadline_s = self._config.layer_deadline_ms / 1e3
        layers = range(layout.num_layers)

        def open_frames(share: slice) -> Frames:
            meter = Meter([hit.source for hit in plan.hits[share]], PREFETCH_LAYERS)
            meters.append(meter)
            stored_s = STORE_SHARE * deadline_s
            return meter.measure(stream_chunks(self._store, manifests[share], layers, heads, stored_s))

        return LayerLoader(
            open_frames,
            placements,
            [layer.rotation.rotary for layer in self._model.layers],
            self._model.device,
            len(heads),
            depth=PREFETCH_LAYERS,
            patience_s=deadline_s,
        )

    def _check_weights(self, metadata: StepMetadata) -> None:
        """Stop blending and saving for good if the weights no longer match the fingerprint.

        Runs in every step with work, so that no pass continues with other weights than it began with. Ranks
        have the same work and decide together: one alone in a layer would wait for the others forever.
        """
        if self._weights is None or self._unable is not None:
            return
        is_new = metadata.blends or metadata.saves or metadata.discovered
        if not (self._has_passes or is_new or self._idle_saves.is_computing):
            return
        self._stop_if_any(self._weights.check())

    def _has_stopped(self) -> bool:
        """Return whether a finished pass was computed with changed weights, and if so end all passes. On a
        CPU the weights were compared at the start of each step; on a GPU the comparison is complete only
        now."""
        weights = self._weights
        return weights is not None and weights.is_late and self._stop_if_any(weights.compare())

    def _stop_if_any(self, change: str | None) -> bool:
        """Stop for good if the weights have changed on some rank. Returns whether they have."""
        if not is_so_on_any_rank(change is not None):
            return False
        reason = (
            f"{WEIGHTS_CHANGED}: {change or 'another rank saw it'}; stored chunks and calibration belong to "
            "the weights that were loaded at start; restart the engine on the new checkpoint"
        )
        self._turn_off(reason)
        self._give_up_everything(reason)
        return True

    def _give_up_everything(self, reason: str) -> None:
        """End all passes, so that vLLM computes their requests. Computed chunks are still stored."""
        for request_id in list(self._blends):
            self._end_blend(request_id).work.close()
            self._fail(request_id, reason)
        waiting = [job.tokens for job in self._blends_waiting] + [job.tokens for job in self._saves_waiting]
        for tokens in waiting:
            self._fail(tokens.request_id, reason)
        if self._save is not None:
            self._abandon_save(self._save.jobs, reason)
        self._blends_waiting, self._saves_waiting = [], []
        self._idle_saves.abandon(reason)

    def _accept(self, metadata: StepMetadata) -> None:
        """Queue new work, or fail it at once if blending is off."""
        if metadata.discovered:
            self._idle_saves.begin(metadata.discovered)
        if self._model is None or self._unable is not None:
            for tokens in [job.tokens for job in metadata.blends] + [job.tokens for job in metadata.saves]:
                self._fail(tokens.request_id, self._unable)
            self._idle_saves.abandon(self._unable)
        else:
            self._blends_waiting += metadata.blends
            self._saves_waiting += metadata.saves
            if metadata.probes and self._probe is None and is_first_rank():
                self._probe = self._probe_thread.submit(self._read_some, metadata.probes[-1])

    def _cancel(self, request_id: str) -> None:
        """Release a cancelled request. The scheduler waits for all requests that it parked."""
        if request_id in self._blends:
            self._end_blend(request_id).work.close()
            self._released.add(request_id)
        elif _remove_job(self._blends_waiting, request_id) or _remove_job(self._saves_waiting, request_id):
            self._released.add(request_id)
        elif self._save is not None:
            # Its tokens are computed with the batch, and its blocks are needed until then.
            self._save.cancelled.add(request_id)

    def _advance(self, prefills: bool) -> None:
        if self._model is not None:
            with self._model.custom_ops_on():
                self._advance_passes(self._model, prefills)

    def _advance_passes(self, model: LoadedModel, prefills: bool) -> None:
        """``prefills`` as in `StepMetadata`."""
        budget = float(self._slice_tokens * len(model.layers))
        while (
            self._blends_waiting and len(self._blends) < PASSES_MAX and self._admit(self._blends_waiting[0])
        ):
            del self._blends_waiting[0]
        is_busy = prefills or any(not blend.job.yields for blend in self._blends.values())
        for request_id, blend in list(self._blends.items()):
            if blend.job.yields and is_busy:
                continue
            if budget <= 0 and not blend.work.is_launched:
                continue
            budget -= self._advance_blend(request_id, blend, budget)
            if blend.work.status is PassStatus.DONE and self._has_stopped():
                return
            if blend.work.status is not PassStatus.RUNNING:
                self._end_blend(request_id)
                self._finished[request_id] = self._account_blend(blend.job, blend.work)
                self._sample(request_id, blend)
                if blend.work.status is PassStatus.FAILED:
                    self._without_kv.add(request_id)
        while budget > 0 and (self._save is not None or self._saves_waiting):
            budget -= self._advance_save(budget)
            if self._save is not None:
                return  # the batch has used its share, or waits for a GPU

    def _advance_idle_saves(self, metadata: StepMetadata) -> None:
        """Advance the batch of discovered segments if the engine has nothing else to compute."""
        if metadata.idle_tokens and self._idle_saves.is_computing and self._model is not None:
            contained = contain_defects("save a batch of discovered segments", self._idle_saves.abandon)
            with self._model.custom_ops_on(), contained:
                self._idle_saves.advance(float(metadata.idle_tokens * len(self._model.layers)))

    def _admit(self, job: BlendJob) -> bool:
        """Begin a blend, or fail it. Returns False if it must wait for memory."""
        assert self._model is not None
        if self._room_bytes is None:
            self._room_bytes = reserve_memory(self._model.device, self._vllm_config.cache_config)
        request_id = job.tokens.request_id
        refused, needed = find_foreign(job, self._model.layout), pass_bytes(self._model, job)
        if needed > self._room_bytes and refused is None:
            if self._blends:
                return False
            refused = describe_refusal(needed, self._room_bytes)
        if refused is not None:
            self._fail(request_id, refused)
            return True
        give_up = partial(self._fail, request_id)
        blend = begin_on_all_ranks(f"blend {request_id}", lambda: self._begin_blend(job, needed), give_up)
        if blend is not None:
            self._blends[request_id] = blend
            self._room_bytes -= needed
        return True

    def _end_blend(self, request_id: str) -> _Blend:
        """Remove a blend from those in flight, and free its memory."""
        blend = self._blends.pop(request_id)
        assert self._room_bytes is not None
        self._room_bytes += blend.bytes_max
        return blend

    def _advance_blend(self, request_id: str, blend: _Blend, budget: float) -> float:
        """Run a slice of a blend. Returns the work done, in token-layers."""
        spent, began = budget, time.perf_counter()
        with contain_defects(f"blend {request_id}, which is prefilled in full", blend.work.abandon):
            spent = blend.work.advance(budget)
        blend.advanced_s += time.perf_counter() - began
        return spent

    def _sample(self, request_id: str, blend: _Blend) -> None:
        """Record samples of a blend for the loading controller, unless it lost chunks."""
        tally = blend.work.tally
        if blend.work.status is PassStatus.FAILED or tally.restarts:
            return
        assert self._model is not None
        device_s = blend.work.watch.seconds()
        busy_s = blend.advanced_s - tally.polled_s if device_s is None else device_s
        self._passes[request_id] = PassSample(busy_s, tally.load_wait_s, self._model.projection_share)
        self._loads.append(LoadSample.of(blend.meters))

    def _read_some(self, job: ProbeJob) -> LoadSample:
        """Read the first layers of some chunks to measure loading."""
        assert self._model is not None
        layers = range(min(PREFETCH_LAYERS, len(self._model.layers)))
        heads = HeadRange.of_rank(job.manifests[job.hits[0].key].layout.num_kv_heads, *rank_and_size())
        return read_and_drop(self._store, job, layers, heads, self._config.layer_deadline_ms / 1e3)

    def _collect_probe(self) -> None:
        if self._probe is None or not self._probe.done():
            return
        probe, self._probe = self._probe, None
        error = probe.exception()
        if error is None:
            self._loads.append(probe.result())
        elif not isinstance(error, KintsugiError):
            logger.error("Reading a chunk to measure loading failed because of a defect", exc_info=error)

    def _fail(self, request_id: str, reason: str | None) -> None:
        """Fail a request, so that vLLM computes it."""
        self._finished[request_id] = Accounting(Outcome.FAILED, reason=reason)
        self._without_kv.add(request_id)

    def _account_blend(self, job: BlendJob, work: BlendPass) -> Accounting:
        assert self._model is not None
        tally = work.tally
        failed = work.status is PassStatus.FAILED
        region_tokens = len(job.tokens.token_ids)
        return Accounting(
            outcome=Outcome.FAILED if failed else Outcome.BLENDED,
            reason=tally.failure,
            selector=job.plan.selection.selector,
            ratio=job.plan.selection.ratio,
            tokens_hit=tally.tokens_hit,
            tokens_recomputed=tally.tokens_recomputed,
            token_layers_computed=round(tally.token_layers, 1),
            token_layers_total=region_tokens * len(self._model.layers),
            bytes_loaded=tally.bytes_loaded,
            transport=self._store.transport,
            load_wait_ms=round(tally.load_wait_s * 1e3, 3),
            compute_ms=round(tally.compute_s * 1e3, 3),
            blend_ms=round((tally.finished_s - tally.started_s) * 1e3, 3),
            restarts=tally.restarts,
            recomputed_positions=tally.active_positions if job.explain else None,
            timeline=tally.timeline if job.timeline else None,
            # By the wall clock, for traces.
            began_unix_s=time.time() - time.perf_counter() + tally.started_s if job.timeline else None,
        )

    def _advance_save(self, budget: float) -> float:
        """Run a slice of the current batch, or of the next one; a defect costs its chunks."""
        if self._save is None:
            count = num_saves_together(self._saves_waiting, self._unit_tokens_max)
            jobs, self._saves_waiting = self._saves_waiting[:count], self._saves_waiting[count:]
        else:
            jobs = self._save.jobs
        task, give_up = f"save a batch of {len(jobs)} chunks", partial(self._abandon_save, jobs)
        if self._save is None:
            self._save = begin_on_all_ranks(
                task, lambda: SaveBatch(jobs, self._save_pass(jobs, self._unit_tokens_max)), give_up
            )
        batch, spent = self._save, budget
        if batch is None:
            return spent
        with contain_defects(task, give_up):
            spent = batch.advance(budget)
        if self._save is batch and batch.work.status is PassStatus.DONE and not self._has_stopped():
            if failure := batch.find_failure():
                self._abandon_save(jobs, failure)
                return spent
            self._save = None
            for job, frames in zip(batch.jobs, batch.work.frames, strict=True):
                self._finish_save(batch, job, frames)
        return spent

    def _abandon_save(self, jobs: list[SaveJob], reason: str) -> None:
        cancelled = self._save.cancelled if self._save is not None else set()
        self._save = None
        for job in jobs:
            if job.tokens.request_id in cancelled:
                self._released.add(job.tokens.request_id)
            else:
                self._fail(job.tokens.request_id, reason)

    def _save_pass(self, jobs: list[SaveJob], unit_tokens_max: int) -> SavePass:
        stack = self._stack([job.tokens for job in jobs])
        # An audit compares the stored chunk with exact KV, regardless of its codec.
        codec = Codec.RAW if jobs[0].is_audit else self._codec
        items = [
            SaveItem(torch.tensor(job.tokens.token_ids), job.tokens.start, job.chunk_start, job.chunk_end)
            for job in jobs
        ]
        return SavePass(items, stack, min(unit_tokens_max, self._unit_tokens_max), codec)

    def _finish_save(self, batch: SaveBatch, job: SaveJob, frames: list[memoryview]) -> None:
        request_id = job.tokens.request_id
        if request_id in batch.cancelled:
            self._released.add(request_id)
            return
        total = sum(len(job.tokens.token_ids) for job in batch.jobs)
        share = len(job.tokens.token_ids) / total
        accounting = Accounting(
            Outcome.AUDITED if job.is_audit else Outcome.SAVED,
            token_layers_computed=round(batch.work.token_layers * share, 1),
            token_layers_total=round(batch.work.token_layers * share),
            compute_ms=round(batch.computed_s * 1e3 * share, 3),
            transport=self._store.transport,
        )
        if not is_first_rank():
            self._finished[request_id] = accounting
            return
        finish = self._audit if job.is_audit else self._put
        self._puts[request_id] = self._put_threads.submit(finish, job, frames, accounting)

    def _put(self, job: SaveJob, frames: list[memoryview], accounting: Accounting) -> Accounting:
        assert self._model is not None
        identity = (job.space, job.key, job.anchors, job.chunk_end - job.chunk_start)
        manifest = ChunkManifest.of(
            *identity,
            self._model.layout,
            self._codec,
            frames,
            asked_at_s=job.asked_at_s,
            context_keys=job.context_keys,
        )
        self._store.put(manifest, frames, accounting.compute_ms, job.ttl_s)
        return accounting

    def _audit(self, job: SaveJob, frames: list[memoryview], accounting: Accounting) -> Accounting:
        """Compare the stored chunk with ``frames``, which contain the heads of all ranks."""
        namespace = job.space.namespace
        (manifest,) = self._store.lookup(namespace, [job.key])
        if manifest is None:
            raise NotFound(f"chunk {job.key} is not stored; there is nothing to audit")
        layout = manifest.layout
        heads, deadline_s = HeadRange(0, layout.num_kv_heads), self._config.layer_deadline_ms / 1e3
        stored = self._store.stream(namespace, [job.key], range(layout.num_layers), heads, deadline_s)
        with closing(stored):
            audit = measure_errors(manifest, stored, frames)
        return dataclasses.replace(accounting, audit=audit, bytes_loaded=manifest.chunk_bytes)

    def _collect_puts(self) -> None:
        """Finish saves whose chunks are stored or refused, and audits whose chunks are read."""
        for request_id, future in list(self._puts.items()):
            if not future.done():
                continue
            del self._puts[request_id]
            self._without_kv |= {request_id} & self._puts_without_kv
            self._finished[request_id] = outcome_of(future)


def _remove_job(jobs: list[Any], request_id: str) -> bool:
    """Remove the job of a request from a list of waiting jobs. Returns whether there was one."""
    index = next((i for i, job in enumerate(jobs) if job.tokens.request_id == request_id), None)
    if index is None:
        return False
    del jobs[index]
    return True

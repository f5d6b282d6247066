"""One vLLM engine behind an event loop: the engine of a service.

vLLM's `AsyncLLM` runs scheduler and worker in a process of their own. This module checks requests, cancels
them, and describes the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kintsugi.core.backend import EngineBackend
from kintsugi.core.deploy import EngineSpec, ModelSpec
from kintsugi.core.errors import InvalidField, KintsugiError, ResourceExhausted, Unavailable, VersionMismatch
from kintsugi.core.exchange import (
    EngineDelta,
    EngineInfo,
    EngineRequest,
    OpenAICall,
    OpenAIHead,
    PromptMatch,
    SaveOutcome,
    SaveState,
    Usage,
)
from kintsugi.core.prompt import FormName
from kintsugi.core.report import Binding
from kintsugi.core.request import PARAMS_KEY, KintsugiParams, check_no_audit
from kintsugi.core.schema import load
from kintsugi.core.spaces import ChunkSpace, check_namespace
from kintsugi.core.tokens import TokenIds
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.local import (
    Generation,
    Prompt,
    base_arguments,
    check_length,
    save_request,
    vllm_start_errors,
)
from kintsugi.engine.openai.options import OPENAI_OPTIONS, OpenAIOptions
from kintsugi.engine.prefetch import prefetch_engine
from kintsugi.engine.sampling import check_sampling
from kintsugi.engine.scheduler.hashing import measured_salt
from kintsugi.engine.watching import (
    LoadMeter,
    LoadStats,
    WatchedClient,
    Watcher,
    audit_chunk,
    prefill_in_full,
)
from kintsugi.engine.worker.hooks import ENGINE_HOOKS, OPENAI_HOOKS, check_vllm, describe_missing
from kintsugi.models.checkpoint import digest_weights
from kintsugi.models.context import NONE, encode_context
from kintsugi.models.layers import DeclineReason
from kintsugi.models.names import find_aliases
from kintsugi.models.prompt_form import PromptForm, load_form
from kintsugi.models.reference import resolve_model
from kintsugi.store.client.registry import is_process_local, open_store
from kintsugi.store.protocol.interface import ChunkStore
from kintsugi.store.protocol.metrics_port import with_readiness

if TYPE_CHECKING:
    from kintsugi.engine.scheduler.gate import Gate

log = logging.getLogger(__name__)

UNABLE = frozenset((*DeclineReason, "self_test_failed"))
"""Reasons that only the worker finds and that last. All others may pass: a report comes, a store answers."""
BIND = "VLLM_CPU_OMP_THREADS_BIND"
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Named by its path: vLLM turns the short name `uni` into `mp` on CPUs, whatever the binding."""
PROBE_NAMESPACE = "kintsugi-probe"
PROBE_TOKENS = 8
GREEDY: Mapping[str, Any] = {"max_tokens": 1, "temperature": 0.0}
"""Sampling of a request whose answer nobody reads."""
SAVES_AT_ONCE = 64
"""Chunks of one call that wait in the engine together."""


@dataclass(frozen=True)
class AsyncSpec:
    """What to start."""

    model: str
    name: str
    """The name that clients use."""
    store: str
    """URL of the chunk store. Scheduler and worker run in another process: no `ram://`."""
    form: FormName = FormName.AUTO
    """How prompts are written."""
    system_prompt: str | None = None
    """The system prompt; None: the chat template's own, if it has one."""
    context: str = NONE
    """What `models.context.encode_context` takes."""
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """More of `engine.config.EngineConfig`."""
    vllm_args: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's `AsyncEngineArgs`."""
    openai: OpenAIOptions = field(default_factory=OpenAIOptions)
    aliases: tuple[str, ...] = ()
    """Other names that clients may use."""

    @staticmethod
    def of(model: ModelSpec, engines: EngineSpec, store: str) -> AsyncSpec:
        """The engine that a service's configuration asks for. Reads the tokenizer where there is a context.
        Raises as `encode_context`, `load_form` and `reference.fetch_model`."""
        connector: dict[str, Any] = {"codec": model.codec, **engines.expert.connector}
        if engines.allow_uncalibrated:
            connector["allow_uncalibrated"] = True
        arguments: dict[str, Any] = dict(engines.vllm)
        options = {name: arguments.pop(name) for name in OPENAI_OPTIONS if name in arguments}
        folder, name = resolve_model(model.path), model.name or Path(model.path).name or model.path
        spec = AsyncSpec(
            folder,
            name,
            store,
            form=FormName(model.expert.form),
            system_prompt=model.system_prompt,
            context=model.expert.context,
            extra_config=connector,
            vllm_args=arguments,
            openai=load(OpenAIOptions, options, "engines.vllm"),
            aliases=find_aliases(name, model.path, folder),
        )
        _ = spec.context_token_ids  # a context that cannot be read is refused at once
        return spec

    @cached_property
    def prompt_form(self) -> PromptForm:
        """The form, whose head is what chunks are prefilled behind. Reads the tokenizer; raises as
        `load_form` does."""
        return load_form(self.model, self.form, self.system_prompt, self.vllm_args)

    @cached_property
    def context_token_ids(self) -> tuple[int, ...]:
        """The context between the prefix and each chunk. Raises as `encode_context` does."""
        return () if self.context == NONE else encode_context(self.context, self.prompt_form.tokenizer)

    @property
    def connector(self) -> dict[str, Any]:
        """The connector's configuration, for vLLM."""
        values: dict[str, Any] = {**self.extra_config, "store": self.store}
        # With a context the form is loaded anyway, and its head saves the engine loading it again.
        if self.form is not FormName.AUTO or self.system_prompt is not None or self.context != NONE:
            values["prefix_token_ids"] = list(self.prompt_form.head)
        if self.context_token_ids:
            values["context_token_ids"] = list(self.context_token_ids)
        return values

    @property
    def config(self) -> EngineConfig:
        """The same, checked. Raises `InvalidField`."""
        if is_process_local(self.store):
            raise InvalidField(
                "store", f"{self.store!r} lives in one process, and this engine's worker runs in another"
            )
        return load(EngineConfig, self.connector, "connector")


@dataclass(frozen=True)
class EngineParts:
    """What `launch` starts and an `AsyncEngine` owns."""

    client: Any
    """vLLM's `AsyncLLM`."""
    store: ChunkStore
    gate: Gate
    unsupported: str | None
    """Why this engine never blends; None where it may."""


async def launch(spec: AsyncSpec, prepare: Callable[[Binding], None]) -> EngineParts:
    """Load the model. 10-30 s.

    ``prepare`` is called on a thread before a calibration report is looked for, with the binding that the
    report must have. Raises `InvalidField` for an impossible configuration, `Unavailable` where vLLM does not
    start, `VersionMismatch` where it lacks what any engine needs.
    """
    config, began_s = spec.config, time.monotonic()
    # The kernel reads ahead what importing and loading read in small pieces.
    asyncio.get_running_loop().run_in_executor(None, prefetch_engine, spec.model)
    # A fingerprint reads all weights: from the disk while vLLM is imported.
    digested = asyncio.get_running_loop().run_in_executor(None, digest_weights, spec.model)
    check_vllm(ENGINE_HOOKS)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from kintsugi.engine.scheduler.gate import binding_of, open_gate

    imported_s = time.monotonic()
    with vllm_start_errors(spec.model):
        vllm_config = AsyncEngineArgs(**arguments_for(spec)).create_engine_config(UsageContext.ENGINE_CONTEXT)
        await digested
        binding = binding_of(vllm_config, config)
        await asyncio.to_thread(prepare, binding)
        store = open_store(config.store)
        gate = await asyncio.to_thread(open_gate, config, store, binding)
        configured_s = time.monotonic()
        client = AsyncLLM.from_vllm_config(vllm_config)
        log.info(
            "vLLM runs: %.1f s to import it, %.1f s to prepare, %.1f s to start its core with the model",
            imported_s - began_s,
            configured_s - imported_s,
            time.monotonic() - configured_s,
        )
    return EngineParts(client, store, gate, why_not_blendable(vllm_config))


def why_not_blendable(vllm_config: Any) -> str | None:
    """`reason: detail` for what rules blending out before a model is looked at; None where nothing does."""
    missing = describe_missing()
    if missing is not None:  # then `worker.support` may not even be importable
        return missing
    from kintsugi.engine.worker.support import find_unsupported

    return find_unsupported(vllm_config)


class AsyncEngine(EngineBackend):
    """A running engine. Make it inside the event loop that uses it, `warm_up`, and `close` it."""

    client: Any = None
    """The `AsyncLLM`, for vLLM's own handling of OpenAI requests; None once closed."""

    def __init__(self, spec: AsyncSpec, parts: EngineParts) -> None:
        """Owns the parts. Not ready before `warm_up`."""
        from kintsugi.engine.scheduler.gate import prefix_of, tokenizer_of

        self._config = spec.config
        self.client = parts.client
        self.store = parts.store
        """Holds the chunks and the calibration reports."""
        self.prefix_token_ids = prefix_of(self._config, parts.client.vllm_config)
        """What chunks are prefilled behind."""
        self.max_model_len = int(parts.client.model_config.max_model_len)
        """Tokens of prompt and answer together that a request may have."""
        self._form = spec.prompt_form
        self._tokenizer = tokenizer_of(parts.client.vllm_config)
        self._spec = spec
        self._load = LoadMeter()
        self._watched = WatchedClient(parts.client, self._load)
        self._gate = parts.gate
        self._declined = parts.unsupported
        self._submitted = 0
        self._front: Any = None
        self._without_front: str | None = None
        """Why OpenAI's routes are closed; None where they are open, or before `warm_up`."""
        self._metrics: Any = None

    async def warm_up(self) -> None:
        """Answer two prompts, so that the first that counts finds everything ready: with the first the worker
        says whether it can blend, and the second is answered accordingly. Also import vLLM's OpenAI
        handlers, which takes seconds; where it lacks some, OpenAI's routes are closed and gRPC's are not."""
        self._without_front = describe_missing(OPENAI_HOOKS)
        if self._without_front is None:
            self._front = self._make_front()
        else:
            log.error("OpenAI's routes are closed, gRPC's are open: %s", self._without_front)
        tokens = TokenIds.of((*self.prefix_token_ids, *range(PROBE_TOKENS)))[-PROBE_TOKENS:]
        params = KintsugiParams(PROBE_NAMESPACE)
        for index in range(2):
            request = EngineRequest(f"warm-up-{index}", tokens, params, GREEDY)
            accounting: Mapping[str, Any] = {}
            async for delta in self.generate(request):
                accounting = delta.accounting or {}
            reason = str(accounting.get("reason") or "")
            if reason.split(":", 1)[0] in UNABLE:
                self._declined = reason

    def _make_front(self) -> Any:
        from kintsugi.engine.openai.handlers import OpenAIFront

        names, options = (self._spec.name, *self._spec.aliases), self._spec.openai
        return OpenAIFront(self._watched, names, self.prefix_token_ids, options)

    async def info(self) -> EngineInfo:
        self.check_health()
        state = self._gate.state
        unable = self._watched.weights_changed or self._declined
        closed = unable or (None if state.is_open else f"{state.reason}: {state.detail}")
        default = None if closed else state.default or self._config.selection
        limits = state.limits
        return EngineInfo(
            model=self._spec.name,
            fingerprint=self._gate.binding.model.hex,
            prefix_token_ids=self.prefix_token_ids,
            portable=self._config.portable,
            max_model_len=self.max_model_len,
            blending=closed or "on",
            tokenizer=self._tokenizer,
            form=self._form.name.value,
            question_foot=self._form.foot,
            context_token_ids=tuple(self._config.context_token_ids),
            plain_copies=self._config.plain_copies,
            aliases=self._spec.aliases,
            selector="" if default is None else default.selector,
            ratio=None if default is None else default.ratio,
            ratios_min=None if limits is None else {name: limit.ratio for name, limit in limits.items()},
            version=self._gate.binding.kintsugi,
            vllm=self._gate.binding.vllm,
        )

    @property
    def binding(self) -> Binding:
        """What a calibration of this engine speaks about."""
        return self._gate.binding

    @property
    def is_held_to_the_store(self) -> bool:
        """Whether a report in the store says what may be blended."""
        return self._config.report is None and not self._config.allow_uncalibrated

    def watch(self, watcher: Watcher | None) -> None:
        """Show sampled answers to `watcher` from now on; None: to none."""
        self._watched.watcher = watcher

    async def answer_in_full(self, prompt: Prompt, priority: int) -> Generation:
        """Compute a full prefill, along `prompt.forced` where that is given, for comparison. Not counted as
        load. Raises `Unavailable`."""
        self.check_health()
        self._submitted += 1
        with _errors_as_ours():
            return await prefill_in_full(self.client, prompt, f"full-{self._submitted}", priority)

    async def audit(self, prompt: Prompt, priority: int) -> Generation:
        """Run the audit of a stored chunk (`engine.auditing`). Not counted as load. Raises `Unavailable`."""
        self.check_health()
        self._submitted += 1
        with _errors_as_ours():
            return await audit_chunk(self.client, prompt, f"audit-{self._submitted}", priority)

    def space(self, namespace: str) -> ChunkSpace:
        """The chunk space of a namespace's requests."""
        name_key = self.store.name_key(namespace)
        return self._config.space(self.binding.model, namespace, self.prefix_token_ids, name_key)

    def stats(self) -> LoadStats:
        return self._load.stats()

    def check_health(self) -> None:
        """Raises `Unavailable` where the engine's process is gone."""
        if self.client is None or self.client.errored:
            raise Unavailable("the engine has ended; it is started again")

    def when_ended(self, act: Callable[[], None]) -> None:
        """Call ``act`` on the event loop once the engine's process has ended by itself; not for `close`."""
        # vLLM does not report it, but the task that reads the core's answers ends with the core.
        self.client.output_handler.add_done_callback(lambda task: None if task.cancelled() else act())

    def serve_metrics(self, host: str, port: int) -> None:
        """Answer Prometheus with what vLLM and the connector count, and readiness probes, until `close`."""
        from prometheus_client import make_wsgi_app, start_http_server
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        registry = get_prometheus_registry()
        self._metrics, _ = start_http_server(port, host, registry)
        self._metrics.set_app(with_readiness(make_wsgi_app(registry), self._why_not_ready))

    def _why_not_ready(self) -> str:
        try:
            self.check_health()
        except Unavailable as error:
            return str(error)
        return ""

    async def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        # Serve streams from generator functions only: a method that returns a generator runs in a thread.
        self.check_health()
        check_no_audit(call.params)
        async with self._open_front().ask(call) as answer:
            yield answer.head
            if answer.events is None:
                yield answer.body
                return
            async for event in answer.events:
                for piece in answer.pass_on(event):
                    yield piece
            for piece in answer.end():
                yield piece

    def _open_front(self) -> Any:
        if self._without_front is not None:
            raise VersionMismatch(f"{self._without_front}; until then ask over gRPC")
        return self._front

    async def find_chunks(self, call: OpenAICall) -> PromptMatch:
        self.check_health()
        from kintsugi.engine.scheduler.matching import (
            match_prompts,  # imports torch; a service starts without
        )

        prompts = await self._open_front().render(call)
        return await asyncio.to_thread(match_prompts, self.store, self.space, call.params, prompts)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        from vllm import TokensPrompt

        self.check_health()
        check_no_audit(request.params)
        self._check_model(request.fingerprint)
        check_length(request.prompt_token_ids, 1, self.max_model_len, "prompt_token_ids")
        sampling = self._sampling(request)
        self._submitted += 1
        # Also where nothing is blended: response times of a shared prefix cache reveal what others ask.
        salt = measured_salt(request.params.namespace, request.measurement)
        outputs = self._watched.generate(
            TokensPrompt(prompt_token_ids=request.prompt_token_ids.to_list(), cache_salt=salt),
            sampling,
            f"{request.request_id}-{self._submitted}",
            trace_headers=dict(request.trace) or None,
            priority=request.priority,
        )
        completed = 0
        with _errors_as_ours():
            async with aclosing(outputs):
                async for output in outputs:
                    piece = output.outputs[0]
                    delta = EngineDelta(
                        tuple(piece.token_ids), piece.text, logprob=_scored(request, output, completed)
                    )
                    completed += len(piece.token_ids)
                    yield _last(delta, output, completed) if output.finished else delta

    def _check_model(self, fingerprint: str) -> None:
        if fingerprint not in ("", self.binding.model.hex):
            raise Unavailable("this engine serves another model than the prompt is for; ask again")

    def _sampling(self, request: EngineRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        values = {
            **self.client.model_config.get_diff_sampling_param(),
            **check_sampling(request.sampling),
        }
        if request.scored_token is not None:
            values["logprob_token_ids"] = [request.scored_token]
        try:
            with _errors_as_ours():
                return SamplingParams(
                    **values,
                    output_kind=RequestOutputKind.DELTA,
                    extra_args={"kv_transfer_params": request.params.to_mapping()},
                )
        except InvalidField as error:
            raise InvalidField("sampling", error.problem) from error

    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        tier: str = "auto",
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        self.check_health()
        check_namespace(namespace)
        kept_in = "" if tier == "auto" else tier
        copies = self.space(namespace).copies(self._config.plain_copies)
        turn = asyncio.Semaphore(SAVES_AT_ONCE)

        async def one(index: int, chunk: TokenIds) -> SaveOutcome:
            outcome = SaveOutcome(SaveState.FAILED)
            for number, copy in enumerate(copies):
                save_id = f"{request_id}-{index}-{number}"
                try:
                    tokens, params = save_request(
                        copy.lead_token_ids,
                        chunk,
                        namespace,
                        tier=kept_in,
                        ttl_s=ttl_s,
                        asked_at_s=asked_at_s,
                    )
                except InvalidField as error:
                    return SaveOutcome(SaveState.FAILED, str(error))
                async with turn:
                    outcome = await self._save_copy(EngineRequest(save_id, tokens, params, GREEDY, priority))
                if outcome.state is not SaveState.SAVED:
                    break
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, chunk)) for index, chunk in enumerate(chunks)]
        return [task.result() for task in tasks]

    async def _save_copy(self, request: EngineRequest) -> SaveOutcome:
        accounting: Mapping[str, Any] = {}
        try:
            async for delta in self.generate(request):
                accounting = delta.accounting or {}
        except KintsugiError as error:
            return SaveOutcome(SaveState.FAILED, str(error))
        if accounting.get("outcome") == SaveState.SAVED.value:
            return SaveOutcome(SaveState.SAVED)
        reason = str(accounting.get("reason") or "the connector did not answer")
        return SaveOutcome(SaveState.FAILED, reason)

    async def close(self) -> None:
        """End the engine's process with what it computes. Idempotent."""
        if self.client is None:
            return
        client, self.client = self.client, None
        self._gate.close()
        self.store.close()
        if self._metrics is not None:
            self._metrics.shutdown()
            self._metrics.server_close()
        if client.output_handler is not None:
            client.output_handler.cancel()  # it would take the core's end for a failure
        await asyncio.to_thread(client.shutdown)
        # vLLM closes its sockets and leaves their context to the garbage collector: two threads, and a
        # warning at whatever runs then.
        await asyncio.to_thread(client.engine_core.resources.ctx.term)


def _scored(request: EngineRequest, output: Any, completed: int) -> float | None:
    """The logprob that the request asks for, in the output that holds the answer's first token."""
    if request.scored_token is None or completed:
        return None
    rows = output.outputs[0].logprobs
    entry = rows[0].get(request.scored_token) if rows else None
    return None if entry is None else float(entry.logprob)


def _last(delta: EngineDelta, output: Any, completed: int) -> EngineDelta:
    """The piece that ends an answer."""
    return dataclasses.replace(
        delta,
        finish_reason=output.outputs[0].finish_reason,
        accounting=(output.kv_transfer_params or {}).get(PARAMS_KEY),
        usage=Usage(len(output.prompt_token_ids), completed, output.num_cached_tokens or 0),
    )


@contextmanager
def _errors_as_ours() -> Iterator[None]:
    """vLLM's errors as ours, by name: what they derive from differs between its versions."""
    try:
        yield
    except Exception as error:
        names = {kind.__name__ for kind in type(error).__mro__}
        if "EngineDeadError" in names:
            raise Unavailable("the engine ended while it answered; ask again") from error
        if "EngineGenerateError" in names:
            raise Unavailable(f"the engine failed to answer: {error.__cause__ or error}") from error
        if getattr(error, "http_status", None) == HTTPStatus.SERVICE_UNAVAILABLE:
            raise ResourceExhausted("the engine's queue is full; try again later") from error
        if names & {"VLLMClientError", "ValueError"}:
            raise InvalidField("request", str(error)) from error
        raise


def arguments_for(spec: AsyncSpec) -> dict[str, Any]:
    """What vLLM's `AsyncEngineArgs` take. Unless given: `base_arguments`, people before saves, and
    on a CPU no process for a single worker."""
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    arguments = base_arguments(spec.connector) | {
        "model": spec.model,
        "served_model_name": spec.name,
        "scheduling_policy": "priority",
        "enable_log_requests": False,
    }
    arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
    if current_platform.is_cpu():
        # Ray counts the cores and OMP_NUM_THREADS says how many; bound, two engines would share the first.
        os.environ.setdefault(BIND, "nobind")
        sizes = (size for name, size in spec.vllm_args.items() if name.endswith("_parallel_size"))
        if os.environ[BIND] == "nobind" and all(size == 1 for size in sizes):
            # vLLM gives a CPU's worker a process so that it can bind its threads. Unbound, as on GPUs, the
            # worker lives in the core's process: vLLM is imported once less (7 s), and kept once less.
            arguments["distributed_executor_backend"] = UNIPROC
    return {**arguments, **spec.vllm_args}

"""An asynchronous vLLM engine: the engine of a service.

vLLM's `AsyncLLM` runs scheduler and worker in a separate process. This module checks and cancels requests,
and describes the engine.
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

from kintsugi import __version__
from kintsugi.core.accounting import Outcome
from kintsugi.core.deploy import EngineSpec, ModelSpec
from kintsugi.core.errors import InvalidField, KintsugiError, ResourceExhausted, Unavailable
from kintsugi.core.exchange import (
    EngineBackend,
    EngineDelta,
    EngineInfo,
    EngineRequest,
    OpenAICall,
    OpenAIHead,
    PromptMatch,
    SaveOutcome,
    Usage,
)
from kintsugi.core.gate import GateProgress, GateState, summarize, widest
from kintsugi.core.plan import FormName
from kintsugi.core.report import Allowance, Binding
from kintsugi.core.request import PARAMS_KEY, KintsugiParams, check_foreign
from kintsugi.core.schema import load
from kintsugi.core.spaces import ChunkSpace, TokenIds, check_namespace
from kintsugi.engine.config import OPENAI_OPTIONS, EngineConfig, OpenAIOptions
from kintsugi.engine.local import (
    Generation,
    Prompt,
    base_arguments,
    check_length,
    check_sampling,
    save_request,
    start_vllm,
)
from kintsugi.engine.prefetch import prefetch_engine
from kintsugi.engine.scheduler.hashing import measured_salt
from kintsugi.engine.watching import (
    LoadMeter,
    LoadStats,
    WatchedClient,
    Watcher,
    measure,
)
from kintsugi.engine.worker.hooks import ENGINE_HOOKS, HOOKS, OPENAI_HOOKS, check_vllm
from kintsugi.models.checkpoint import digest_weights
from kintsugi.models.context import NONE, encode_context
from kintsugi.models.declines import DeclineReason
from kintsugi.models.hub import find_aliases
from kintsugi.models.prompt_form import PromptForm, load_form
from kintsugi.models.reference import resolve_model
from kintsugi.store.client.registry import is_process_local, open_store
from kintsugi.store.protocol.interface import ChunkStore
from kintsugi.store.protocol.metrics_port import MetricsServer, with_readiness

if TYPE_CHECKING:
    from kintsugi.engine.scheduler.gate import Gate

log = logging.getLogger(__name__)

UNABLE = frozenset((*DeclineReason, "self_test_failed"))
"""Permanent reasons that only the worker finds. Other reasons may disappear, for instance when a report
arrives or the store answers."""
BIND = "VLLM_CPU_OMP_THREADS_BIND"
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The executor's path. On CPUs vLLM changes the short name `uni` into `mp`, even if threads are not bound."""
PROBE_NAMESPACE = "kintsugi-probe"
PROBE_TOKENS = 8
GREEDY: Mapping[str, Any] = {"max_tokens": 1, "temperature": 0.0}
"""Sampling parameters of requests whose answers are not used."""
SAVES_AT_ONCE = 64
"""Maximum number of chunks of one call that wait in the engine together."""


@dataclass(frozen=True)
class AsyncSpec:
    """Description of an engine to start."""

    model: str
    name: str
    """The name that clients use."""
    store: str
    """URL of the chunk store. Not `ram://`, because scheduler and worker run in another process."""
    form: FormName = FormName.AUTO
    """Form in which prompts are written."""
    system_prompt: str | None = None
    """The system prompt; None: the chat template's own, if it has one."""
    context: str = NONE
    """A context as `models.context.encode_context` accepts it."""
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `engine.config.EngineConfig`."""
    vllm_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`."""
    openai: OpenAIOptions = field(default_factory=OpenAIOptions)
    aliases: tuple[str, ...] = ()
    """Other names that clients may use."""

    @staticmethod
    def of(model: ModelSpec, engines: EngineSpec, store: str) -> AsyncSpec:
        """Return the description of the engine that a service's configuration specifies. Reads the tokenizer
        if there is a context. Raises as `encode_context`, `load_form` and `reference.fetch_model` do."""
        connector: dict[str, Any] = {"codec": model.codec, **engines.expert.connector}
        connector.setdefault("quality", engines.quality)
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
        _ = spec.context_token_ids  # refuses an unreadable context at once
        return spec

    @cached_property
    def prompt_form(self) -> PromptForm:
        """The prompt form, whose head precedes chunks in their prefill. Reads the tokenizer; raises as
        `load_form` does."""
        return load_form(self.model, self.form, self.system_prompt, self.vllm_args)

    @cached_property
    def context_token_ids(self) -> tuple[int, ...]:
        """The context between the prefix and each chunk. Raises as `encode_context` does."""
        return () if self.context == NONE else encode_context(self.context, self.prompt_form.tokenizer)

    @property
    def connector(self) -> dict[str, Any]:
        """The connector's configuration as a mapping for vLLM."""
        values: dict[str, Any] = {**self.extra_config, "store": self.store}
        # With a context the form is already loaded; passing its head saves loading it in the engine.
        if self.form is not FormName.AUTO or self.system_prompt is not None or self.context != NONE:
            values["prefix_token_ids"] = list(self.prompt_form.head)
        if self.context_token_ids:
            values["context_token_ids"] = list(self.context_token_ids)
        return values

    @property
    def config(self) -> EngineConfig:
        """The checked configuration of the connector. Raises `InvalidField`."""
        if is_process_local(self.store):
            raise InvalidField(
                "store", f"{self.store!r} lives in one process, and this engine's worker runs in another"
            )
        return load(EngineConfig, self.connector, "connector")


@dataclass(frozen=True)
class EngineParts:
    """The running parts of an engine, which `launch` starts and an `AsyncEngine` owns."""

    client: Any
    """vLLM's `AsyncLLM`."""
    store: ChunkStore
    gate: Gate
    unsupported: str | None
    """The reason why this engine never blends; None if it may blend."""


async def launch(spec: AsyncSpec, prepare: Callable[[Binding], None]) -> EngineParts:
    """Start vLLM and load the model, in 10-30 s.

    ``prepare`` is called on a thread with the binding that a calibration report must have, before the report
    is read. Raises `InvalidField` for an invalid configuration, `Unavailable` if vLLM does not start,
    `VersionMismatch` if it lacks a name that an engine needs.
    """
    config, began_s = spec.config, time.monotonic()
    # The kernel reads ahead; importing and loading would read in small pieces.
    asyncio.get_running_loop().run_in_executor(None, prefetch_engine, spec.model)
    # The fingerprint reads all weights; do so from disk while vLLM is imported.
    digested = asyncio.get_running_loop().run_in_executor(None, digest_weights, spec.model)
    check_vllm((*HOOKS, *ENGINE_HOOKS, *OPENAI_HOOKS))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from kintsugi.engine.scheduler.gate import binding_of, open_gate
    from kintsugi.engine.worker.support import find_unsupported

    imported_s = time.monotonic()
    with start_vllm(spec.model):
        vllm_config = AsyncEngineArgs(**arguments_for(spec)).create_engine_config(UsageContext.ENGINE_CONTEXT)
        await digested
        binding = binding_of(vllm_config, config)
        await asyncio.to_thread(prepare, binding)
        store = open_store(config.store)
        gate = await asyncio.to_thread(open_gate, config, store, binding)
        configured_s = time.monotonic()
        client = AsyncLLM.from_vllm_config(vllm_config)
        log.info(
            "vLLM is running: %.1f s to import, %.1f s to prepare, %.1f s to start its core with the model",
            imported_s - began_s,
            configured_s - imported_s,
            time.monotonic() - configured_s,
        )
    return EngineParts(client, store, gate, find_unsupported(vllm_config))


class AsyncEngine(EngineBackend):
    """A running engine. Create it inside the event loop that uses it, then call `warm_up`, and finally
    `close`."""

    client: Any = None
    """The `AsyncLLM`, for vLLM's own handling of OpenAI requests; None once closed."""

    def __init__(self, spec: AsyncSpec, parts: EngineParts) -> None:
        """Take ownership of the parts. The engine is not ready before `warm_up`."""
        from kintsugi.engine.scheduler.gate import prefix_of, tokenizer_of

        self._config = spec.config
        self.client = parts.client
        self.store = parts.store
        """The store of chunks and calibration reports."""
        self.prefix_token_ids = prefix_of(self._config, parts.client.vllm_config)
        """Token ids that precede every chunk when it is prefilled."""
        self.max_model_len = int(parts.client.model_config.max_model_len)
        """Maximum tokens of prompt and answer together."""
        self._form = spec.prompt_form
        self._tokenizer = tokenizer_of(parts.client.vllm_config)
        self._spec = spec
        self._load = LoadMeter()
        self.watched = WatchedClient(parts.client, self._load)
        """The client whose load and answers are measured."""
        self._gate = parts.gate
        self._declined = parts.unsupported
        self._submitted = 0
        self._front: Any = None
        self._metrics: MetricsServer | None = None

    async def warm_up(self) -> None:
        """Prepare the engine for requests: import vLLM's OpenAI handlers, which takes seconds, and answer two
        prompts. With the first prompt the worker reports whether it can blend; the second answer shows it."""
        self._front = self._make_front()
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
        return OpenAIFront(self.watched, names, self.prefix_token_ids, options)

    async def info(self, namespace: str = "") -> EngineInfo:
        from vllm import __version__ as vllm_version

        self.check_health()
        state = self._gate.state
        unable = self.watched.weights_changed or self._declined
        progress = summarize(state, namespace or None)
        if unable:
            progress = GateProgress("closed", unable)
        untested = self._config.selection if progress.state == "off" else None
        opened = None if unable else widest(state, namespace or None)
        default = untested if opened is None else opened[2].cheapest
        return EngineInfo(
            model=self._spec.name,
            fingerprint=self._gate.binding.model.hex,
            prefix_token_ids=self.prefix_token_ids,
            portable=self._config.portable,
            max_model_len=self.max_model_len,
            blending="on" if default else unable or _why_closed(state, progress),
            progress=progress,
            tokenizer=self._tokenizer,
            form=self._form.name.value,
            question_foot=self._form.foot,
            context_token_ids=tuple(self._config.context_token_ids),
            plain_copies=self._config.plain_copies,
            aliases=self._spec.aliases,
            selector="" if default is None else default.selector,
            ratio=None if default is None else default.ratio,
            ratios_min=None if untested else _least_ratios(opened),
            version=__version__,
            vllm=vllm_version,
        )

    @property
    def binding(self) -> Binding:
        """The binding of calibration reports about this engine."""
        return self._gate.binding

    @property
    def gate(self) -> Gate:
        """The gate, which reads the report."""
        return self._gate

    @property
    def learns(self) -> bool:
        """Whether the store's report decides what may be blended, so that this engine adds evidence."""
        return self._config.report is None and not self._gate.is_fixed

    def watch(self, watcher: Watcher | None) -> None:
        """Pass sampled answers to ``watcher`` from now on; None: stop sampling."""
        self.watched.watcher = watcher

    async def measure(self, prompt: Prompt, priority: int) -> Generation:
        """Compute for comparison (`watching.measure`). Not counted as load. Raises `Unavailable`."""
        self.check_health()
        self._submitted += 1
        with _errors_as_ours():
            return await measure(self.client, prompt, f"measured-{self._submitted}", priority)

    def space(self, namespace: str) -> ChunkSpace:
        """Return the chunk space of a namespace's requests."""
        name_key = self.store.name_key(namespace)
        return self._config.space(self.binding.model, namespace, self.prefix_token_ids, name_key)

    def stats(self) -> LoadStats:
        return self._load.stats()

    def check_health(self) -> None:
        """Raise `Unavailable` if the engine's process has ended."""
        if self.client is None or self.client.errored:
            raise Unavailable("the engine's process has ended; a new engine starts")

    def when_ended(self, act: Callable[[], None]) -> None:
        """Call ``act`` on the event loop if the engine's process ends unexpectedly, which excludes an end by
        `close`."""
        # vLLM does not report it, but the task that reads the core's answers ends with the core.
        self.client.output_handler.add_done_callback(lambda task: None if task.cancelled() else act())

    def serve_metrics(self, host: str, port: int) -> None:
        """Serve metrics of vLLM and the connector to Prometheus, and readiness probes, until `close`."""
        from prometheus_client import make_wsgi_app
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        app = make_wsgi_app(get_prometheus_registry())
        self._metrics = MetricsServer(with_readiness(app, self._why_not_ready), host, port)

    def _why_not_ready(self) -> str:
        try:
            self.check_health()
        except Unavailable as error:
            return str(error)
        return ""

    async def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        # Ray Serve streams only from generator functions: a method that returns a generator runs in a thread.
        self.check_health()
        check_foreign(call.params)
        async with self._front.ask(call) as answer:
            yield answer.head
            if answer.events is None:
                yield answer.body
                return
            async for event in answer.events:
                for piece in answer.pass_on(event):
                    yield piece
            for piece in answer.end():
                yield piece

    async def find_chunks(self, call: OpenAICall) -> PromptMatch:
        self.check_health()
        from kintsugi.engine.scheduler.matching import (
            match_prompts,  # imports torch; a service starts without
        )

        prompts = await self._front.render(call)
        return await asyncio.to_thread(match_prompts, self.store, self.space, call.params, prompts)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        from vllm import TokensPrompt

        self.check_health()
        check_foreign(request.params)
        self._check_model(request.fingerprint)
        check_length(request.prompt_token_ids, 1, self.max_model_len, "prompt_token_ids")
        sampling = self._sampling(request)
        self._submitted += 1
        # Also without blending: response times of a shared prefix cache reveal the prompts of others.
        salt = measured_salt(request.params.namespace, request.measurement)
        outputs = self.watched.generate(
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
            raise Unavailable(
                "this engine serves another model than the one that the prompt is for; send the request again"
            )

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
        except (InvalidField, ValueError) as error:  # vLLM checks only the request's parameters
            raise InvalidField("sampling", getattr(error, "problem", str(error))) from error

    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        self.check_health()
        check_namespace(namespace)
        copies = self.space(namespace).copies(self._config.plain_copies)
        turn = asyncio.Semaphore(SAVES_AT_ONCE)

        async def one(index: int, chunk: TokenIds) -> SaveOutcome:
            outcome = SaveOutcome(is_saved=False)
            for number, copy in enumerate(copies):
                save_id = f"{request_id}-{index}-{number}"
                try:
                    tokens, params = save_request(
                        copy.lead_token_ids, chunk, namespace, ttl_s=ttl_s, asked_at_s=asked_at_s
                    )
                except InvalidField as error:
                    return SaveOutcome(False, str(error))
                async with turn:
                    outcome = await self._save_copy(EngineRequest(save_id, tokens, params, GREEDY, priority))
                if not outcome.is_saved:
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
            return SaveOutcome(False, str(error))
        if accounting.get("outcome") == Outcome.SAVED.value:
            return SaveOutcome(is_saved=True)
        reason = str(accounting.get("reason") or "the connector did not answer")
        return SaveOutcome(False, reason)

    async def close(self) -> None:
        """End the engine's process and abort its requests. Idempotent."""
        if self.client is None:
            return
        client, self.client = self.client, None
        self._gate.close()
        self.store.close()
        if self._metrics is not None:
            self._metrics.stop()
        if client.output_handler is not None:
            client.output_handler.cancel()  # it would treat the core's end as a failure
        await asyncio.to_thread(client.shutdown)
        # vLLM leaves its sockets' context, with two threads, to the garbage collector, which would warn at a
        # random later time.
        await asyncio.to_thread(client.engine_core.resources.ctx.term)


def _why_closed(state: GateState, progress: GateProgress) -> str:
    return f"{state.reason or progress.state}: {state.detail if state.reason else progress.detail}"


def _least_ratios(opened: tuple[Any, str, Allowance] | None) -> dict[str, float]:
    """Return the lowest open ratio by selector."""
    passed = () if opened is None else opened[2].selections
    return {str(one.selector): one.ratio for one in sorted(passed, key=lambda one: -one.ratio)}


def _scored(request: EngineRequest, output: Any, completed: int) -> float | None:
    """Return the requested logprob from the output with the answer's first token; None for other outputs."""
    if request.scored_token is None or completed:
        return None
    rows = output.outputs[0].logprobs
    entry = rows[0].get(request.scored_token) if rows else None
    return None if entry is None else float(entry.logprob)


def _last(delta: EngineDelta, output: Any, completed: int) -> EngineDelta:
    """Complete the last piece of an answer with its accounting and usage."""
    return dataclasses.replace(
        delta,
        finish_reason=output.outputs[0].finish_reason,
        accounting=(output.kv_transfer_params or {}).get(PARAMS_KEY),
        usage=Usage(len(output.prompt_token_ids), completed, output.num_cached_tokens or 0),
    )


@contextmanager
def _errors_as_ours() -> Iterator[None]:
    """Translate vLLM's errors by their names: their base classes differ between versions."""
    try:
        yield
    except Exception as error:
        names = {kind.__name__ for kind in type(error).__mro__}
        if "EngineDeadError" in names:
            raise Unavailable("the engine ended while it answered; send the request again") from error
        if "EngineGenerateError" in names:
            raise Unavailable(f"the engine failed to answer: {error.__cause__ or error}") from error
        if getattr(error, "http_status", None) == HTTPStatus.SERVICE_UNAVAILABLE:
            raise ResourceExhausted("the engine's queue is full; try again later") from error
        if names & {"VLLMClientError", "VLLMValidationError"}:  # any other ValueError is a defect
            raise InvalidField("request", str(error)) from error
        raise


def arguments_for(spec: AsyncSpec) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`. Defaults are `base_arguments`, scheduling by
    priority, and on a CPU no separate process for a single worker."""
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    arguments = base_arguments(spec.model, spec.connector) | {
        "model": spec.model,
        "served_model_name": spec.name,
        "scheduling_policy": "priority",
        "enable_log_requests": False,
    }
    arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
    if current_platform.is_cpu():
        # Ray assigns cores by OMP_NUM_THREADS. With bound threads, two engines would share the first cores.
        os.environ.setdefault(BIND, "nobind")
        sizes = (size for name, size in spec.vllm_args.items() if name.endswith("_parallel_size"))
        if os.environ[BIND] == "nobind" and all(size == 1 for size in sizes):
            # vLLM starts a process for a CPU's worker to bind its threads. Unbound, the worker runs in the
            # core's process, as on GPUs: this saves one import of vLLM (7 s) and its memory.
            arguments["distributed_executor_backend"] = UNIPROC
    return {**arguments, **spec.vllm_args}

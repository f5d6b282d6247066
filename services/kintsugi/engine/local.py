"""A vLLM engine inside this process, for the CLI, tests and benchmarks.

It steps the engine itself, over vLLM's `LLM` and `LLMEngine`, and cannot wrap `AsyncEngine`: vLLM's
`AsyncLLM` always runs its core in another process (`EngineCoreClient.make_async_mp_client`), and measurements
here need the core in this process: stores in memory (`ram://`), the connector's scheduler side, and the time
of each token. Prompts that are submitted together share steps, as in a server. The module also contains what
both engines share: their requests and vLLM's arguments.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from kintsugi.core.accounting import Outcome
from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    KintsugiError,
    NotBlendable,
    NotFound,
    Unavailable,
)
from kintsugi.core.plan import Selection
from kintsugi.core.report import Binding
from kintsugi.core.request import PARAMS_KEY, KintsugiParams, Op
from kintsugi.core.schema import STRICT, load
from kintsugi.core.sizing import CPU_KV_CACHE_GIB
from kintsugi.core.spaces import ChunkKey, ChunkSpace, Span, TokenIds
from kintsugi.engine.plugin import CONNECTOR
from kintsugi.engine.versions import WORKING
from kintsugi.engine.worker.hooks import ENGINE_HOOKS, HOOKS, LOCAL_HOOKS, check_vllm
from kintsugi.models.reference import default_dtype, resolve_model
from kintsugi.store.protocol.save_times import SaveTimes

if TYPE_CHECKING:
    from vllm import TokensPrompt

    from kintsugi.engine.scheduler.side import SchedulerSide

GENERATE_TIMEOUT_S = 900.0
IDLE_S = 0.001
"""A step without outputs that takes less time has computed nothing; the next step begins this much later."""
STOPS_MAX = 16
BIASES_MAX = 1024
_Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
"""The largest integer that can be serialised for an engine's process (64 bits)."""


@dataclass(frozen=True)
class Prompt:
    """A request to an engine."""

    token_ids: Sequence[int]
    """The whole prompt."""
    params: KintsugiParams | None = None
    """Kintsugi's parameters; None: a plain request to vLLM."""
    max_tokens: int = 16
    """Maximum tokens of the answer."""
    cache_salt: str | None = None
    """vLLM's `cache_salt`. The connector sets it to the namespace; set it only to test this."""
    top_logprobs: int = 0
    """Number of most likely tokens whose logprobs are returned at each step, besides the chosen one's."""
    ignore_eos: bool = False
    """Continue after the token that ends a text."""
    forced: Sequence[int] | None = None
    """Return the distributions along these tokens instead of an answer. Several need a trial."""
    priority: int = 0
    """vLLM's priority: lower goes first. Has an effect only if the engine schedules by priority."""


@dataclass(frozen=True)
class Generation:
    """The answer to a request, by greedy decoding."""

    token_ids: list[int]
    """The answer's tokens."""
    text: str = ""
    ttft_s: float = float("nan")
    """Seconds from the request's arrival to its first token; NaN if not measured."""
    itl_s: list[float] = field(default_factory=list)
    """Seconds between successive tokens: one value fewer than tokens."""
    logprobs: list[float] = field(default_factory=list)
    """The logprob of each chosen token; NaN for a last forced token that is not among the best."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """Logprobs by token id at each step: the chosen token's and those of the `Prompt.top_logprobs` best."""
    finish_reason: str | None = None
    """vLLM's reason why the answer ended."""
    num_cached_tokens: int = 0
    """Prompt tokens that the engine did not compute: from the prefix cache or the connector."""
    accounting: dict[str, Any] | None = None
    """The response's `kv_transfer_params["kintsugi"]`."""

    @property
    def is_saved(self) -> bool:
        """Whether this request stored a chunk."""
        return (self.accounting or {}).get("outcome") == Outcome.SAVED.value


@dataclass
class _Running:
    """A request between `add_request` and its last token."""

    started_s: float
    forced: Sequence[int] | None = None
    token_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    steps: list[dict[int, float]] = field(default_factory=list)
    generation: Generation | None = None

    def take(self, output: Any, now_s: float) -> None:
        """Add the tokens of one `vllm.RequestOutput` in delta form."""
        completion = output.outputs[0]
        rows = rows_along(output, self.forced) if self.forced else completion.logprobs or ()
        self.token_times_s += [now_s] * len(completion.token_ids)
        self.token_ids += completion.token_ids
        self.text += completion.text
        for entries in rows:
            self.steps.append({token: entry.logprob for token, entry in entries.items()})
        if output.finished:
            self.generation = self._build_generation(output, completion.finish_reason)

    def _build_generation(self, output: Any, finish_reason: str | None) -> Generation:
        times, token_ids = self.token_times_s, list(self.forced or self.token_ids)[: len(self.steps)]
        return Generation(
            token_ids=token_ids,
            text=self.text,
            ttft_s=times[0] - self.started_s if times else float("nan"),
            itl_s=[later - earlier for earlier, later in pairwise(times)],
            logprobs=[step.get(token, math.nan) for step, token in zip(self.steps, token_ids, strict=True)],
            top_logprobs=self.steps,
            finish_reason=finish_reason,
            num_cached_tokens=output.num_cached_tokens or 0,
            accounting=(output.kv_transfer_params or {}).get(PARAMS_KEY),
        )


class LocalEngine:
    """A running engine. Use `start`, and `close` when done (or a `with` block). One thread at a time."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        """The `vllm.LLM`, for other calls."""
        self._submitted = 0

    @staticmethod
    def start(
        model: str | Path, *, extra_config: Mapping[str, object] | None = None, **vllm_args: Any
    ) -> LocalEngine:
        """Load `model`: a checkpoint folder, the reference model's name, or a name that vLLM resolves.

        ``extra_config`` is the connector's configuration (`engine.config.EngineConfig`); None starts plain
        vLLM. ``vllm_args`` are passed to `vllm.LLM`; defaults are eager execution, and `CPU_KV_CACHE_GIB` of
        KV cache on a CPU. Sets `VLLM_ENABLE_V1_MULTIPROCESSING=0`, so that ``ram://`` stores are shared.
        Takes 10-30 s, mostly for imports. Raises `NotFound` for a missing folder, `Unavailable` if vLLM does
        not start, `VersionMismatch` if it lacks a name that an engine needs, and the errors of the connector
        and of `reference.fetch_model`.
        """
        if isinstance(model, Path) and not model.is_dir():
            raise NotFound(f"{model} is not a folder; pass the folder of a checkpoint")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        check_vllm((*ENGINE_HOOKS, *LOCAL_HOOKS))
        if extra_config is not None:
            check_vllm(HOOKS)
        from vllm import LLM

        arguments = base_arguments(model, extra_config) | {"use_tqdm_on_load": False, **vllm_args}
        with start_vllm(model):
            return LocalEngine(LLM(model=resolve_model(model), **arguments))

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loads it."""
        return self.llm.get_tokenizer()

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return int(self.llm.llm_engine.model_config.max_model_len)

    def generate(self, prompts: Sequence[Prompt], timeout_s: float = GENERATE_TIMEOUT_S) -> list[Generation]:
        """Answer all prompts, and return the answers in order.

        Prompts are submitted together. Raises `InvalidField` before any submission if a prompt is empty or
        too long, and `DeadlineExceeded` after ``timeout_s``, with all requests aborted.
        """
        for index, prompt in enumerate(prompts):
            where = f"prompts[{index}]"
            if prompt.max_tokens < 1:
                raise InvalidField(f"{where}.max_tokens", f"{prompt.max_tokens} must be at least 1")
            check_length(prompt.token_ids, prompt.max_tokens, self.max_model_len, f"{where}.token_ids")
        started_s = time.perf_counter()
        running: dict[str, _Running] = {}
        for request_id, prompt in zip(self._ids(len(prompts)), prompts, strict=True):
            running[request_id] = _Running(time.perf_counter(), prompt.forced)
            self._submit(request_id, prompt)
        while any(request.generation is None for request in running.values()):
            if time.perf_counter() - started_s > timeout_s:
                self.llm.llm_engine.abort_request(list(running))
                raise DeadlineExceeded(f"no answer within {timeout_s:.0f} s; the requests were aborted")
            stepped_s = time.perf_counter()
            outputs = self.llm.llm_engine.step()
            for output in outputs:
                running[output.request_id].take(output, time.perf_counter())
            if not outputs and time.perf_counter() - stepped_s < IDLE_S:
                # Every request waits, perhaps for the store, whose threads need the processor.
                time.sleep(IDLE_S)
        return [request.generation for request in running.values() if request.generation is not None]

    def save(
        self, prefix_token_ids: Sequence[int], chunks: Sequence[Sequence[int]], namespace: str
    ) -> list[Generation]:
        """Prefill chunks in isolation after the prefix, and store their KV, all in one batch.

        With a context, every copy of a chunk is stored. Returns one result per chunk: that of the first copy
        that could not be stored, or else that of the prepared copy.
        """
        config = self._scheduler.config
        space = config.space(self.binding.model, namespace, prefix_token_ids)
        leads = [copy.lead_token_ids for copy in space.copies(config.plain_copies)]
        saved = self.generate([save_prompt(lead, chunk, namespace) for chunk in chunks for lead in leads])
        copies = [saved[start : start + len(leads)] for start in range(0, len(saved), len(leads))]
        return [next((one for one in some if not one.is_saved), some[0]) for some in copies]

    @property
    def binding(self) -> Binding:
        """The binding of reports about this engine."""
        return self._scheduler.gate.binding

    def refresh_gate(self) -> None:
        """Read the report now, instead of at the next poll."""
        self._scheduler.gate.refresh()

    @property
    def prefix_token_ids(self) -> tuple[int, ...]:
        """Token ids that precede every chunk when it is prefilled."""
        return self._scheduler.prefix_token_ids

    @property
    def context_token_ids(self) -> tuple[int, ...]:
        """The context between the prefix and each chunk while the chunk is prefilled."""
        return tuple(self._scheduler.config.context_token_ids)

    def space(self, namespace: str) -> ChunkSpace:
        """Return the chunk space of a namespace's requests."""
        side = self._scheduler
        name_key = side.store.name_key(namespace)
        return side.config.space(self.binding.model, namespace, side.prefix_token_ids, name_key)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the model."""
        return int(self.llm.llm_engine.model_config.hf_text_config.num_hidden_layers)

    def plan_with(self, selection: Selection) -> None:
        """Set the selection of requests without one. Has an effect only while `quality` is off."""
        self._scheduler.planner = self._scheduler.planner.with_selection(selection)

    @property
    def versions(self) -> str:
        """Versions and device, as in `core.report.ReportPart`."""
        from kintsugi.engine.scheduler.gate import describe_versions

        return describe_versions()

    @property
    def _scheduler(self) -> SchedulerSide:
        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        for part in getattr(connector, "sub_connectors", [connector]):
            if hasattr(part, "_scheduler"):
                side: SchedulerSide = part._scheduler
                return side
        raise NotBlendable("connector", f"this engine's connector is a {type(connector).__name__}. {WORKING}")

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that the next prompt is prefilled from its first token."""
        if self.llm.reset_prefix_cache():
            return
        # With async scheduling, a step beyond an answer's end may be in flight and hold its blocks.
        self.llm.llm_engine.step()
        if not self.llm.reset_prefix_cache():
            raise Unavailable("the prefix cache is in use; wait for running requests to end")

    def close(self) -> None:
        """Shut the engine down and free its memory. Idempotent."""
        if self.llm is None:
            return
        import torch

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # the next engine of this process measures free memory

    def _ids(self, count: int) -> list[str]:
        """Return new request ids."""
        first, self._submitted = self._submitted, self._submitted + count
        return [f"local-{index}" for index in range(first, first + count)]

    def _submit(self, request_id: str, prompt: Prompt) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if prompt.forced:
            prompt = along_answer(prompt)
        params = prompt.params
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=prompt.max_tokens,
            logprobs=prompt.top_logprobs,
            ignore_eos=prompt.ignore_eos,
            detokenize=not prompt.forced,  # rows of blended tokens hold arbitrary ids
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if params is None else {"kv_transfer_params": params.to_mapping()},
            **(logprobs_along(prompt) if prompt.forced else {}),
        )
        tokens = tokens_prompt(prompt)
        self.llm.llm_engine.add_request(request_id, tokens, sampling, priority=prompt.priority)


@dataclass(frozen=True)
class _Sampling:
    """The fields of vLLM's `SamplingParams` that a request for a single answer may set. For a field with the
    value None, the model's default applies."""

    __pydantic_config__ = STRICT

    max_tokens: _Whole | None = None
    min_tokens: _Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: _Whole | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[_Whole] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[Annotated[int, Field(ge=0, lt=1 << 32)], float] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidField("sampling.max_tokens", f"{self.max_tokens} must be at least 1")
        if isinstance(self.stop, list) and len(self.stop) > STOPS_MAX:
            raise InvalidField("sampling.stop", f"has {len(self.stop)} texts; send at most {STOPS_MAX}")
        if self.logit_bias is not None and len(self.logit_bias) > BIASES_MAX:
            raise InvalidField(
                "sampling.logit_bias", f"has {len(self.logit_bias)} tokens; send at most {BIASES_MAX}"
            )


def check_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for vLLM's `SamplingParams`. Raises `InvalidField`, or `UnknownField` with the
    nearest valid name.

    vLLM checks ranges itself; the caller must translate its `ValueError`.
    """
    sampling = load(_Sampling, values, where="sampling")
    return {name: value for name, value in dataclasses.asdict(sampling).items() if value is not None}


def check_length(token_ids: Sequence[int], answer_tokens: int, max_model_len: int, where: str) -> None:
    """Raise `InvalidField` for a prompt that is empty or leaves no room for its answer. ``where`` names the
    field."""
    if not token_ids:
        raise InvalidField(where, "is empty; a prompt needs at least one token")
    if len(token_ids) + answer_tokens > max_model_len:
        raise InvalidField(
            where,
            f"{len(token_ids)} tokens and {answer_tokens} to generate exceed the model's {max_model_len}; "
            "use fewer or shorter chunks",
        )


def tokens_prompt(prompt: Prompt) -> TokensPrompt:
    """Return vLLM's prompt, with its `cache_salt`."""
    from vllm import TokensPrompt

    tokens = TokensPrompt(prompt_token_ids=list(prompt.token_ids))
    if prompt.cache_salt is not None:
        tokens["cache_salt"] = prompt.cache_salt
    return tokens


def along_answer(prompt: Prompt) -> Prompt:
    """Return the request that computes a trial along `Prompt.forced` in one prefill: all forced tokens but
    the last follow the prompt, and the engine computes them after the blend."""
    assert prompt.forced
    params, more = prompt.params, list(prompt.forced[:-1])
    if more:
        assert params is not None
        assert params.trial is not None
        trial = dataclasses.replace(params.trial, answer_tokens=len(more))
        params = dataclasses.replace(params, trial=trial)
    token_ids = [*prompt.token_ids, *more]
    return dataclasses.replace(prompt, token_ids=token_ids, params=params, max_tokens=1)


def logprobs_along(prompt: Prompt) -> dict[str, Any]:
    """Return vLLM's sampling parameters for the distributions along `Prompt.forced`, which follows the
    prompt. They are reported only for tokens that vLLM computes itself."""
    count = prompt.top_logprobs if len(prompt.forced or ()) > 1 else None
    return {"prompt_logprobs": count, "skip_reading_prefix_cache": False}


def rows_along(output: Any, forced: Sequence[int]) -> list[Any]:
    """Return the distributions along the forced tokens from vLLM's output of a prompt that ends with all of
    them but the last. Only one if the prompt was not blended."""
    rows = output.prompt_logprobs[1 - len(forced) :] if len(forced) > 1 else ()
    return [*filter(None, rows), *output.outputs[0].logprobs]


def base_arguments(model: str | Path, extra_config: Mapping[str, object] | None) -> dict[str, Any]:
    """Return vLLM's arguments for every engine: eager execution, the model's `default_dtype`,
    `CPU_KV_CACHE_GIB` of KV cache on a CPU, and the connector with this configuration; None: no connector."""
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {"enforce_eager": True, "dtype": default_dtype(model)}
    if current_platform.is_cpu():
        arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_GIB << 30
    if extra_config is not None:
        arguments["kv_transfer_config"] = transfer_config({"audits": True, **extra_config})
    return arguments


@contextmanager
def start_vllm(model: str | Path) -> Iterator[None]:
    """Start vLLM in the block: without reports to its vendor, unless `VLLM_NO_USAGE_STATS` is set, and with
    its errors translated into `Unavailable`. vLLM raises many types, from a bad configuration value to a
    failed allocation."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        yield
    except KintsugiError:
        raise
    except Exception as error:
        raise Unavailable(f"vLLM did not start on {model}: {type(error).__name__}: {error}") from error


def transfer_config(extra_config: Mapping[str, object]) -> dict[str, object]:
    """Return vLLM's `--kv-transfer-config` for the connector."""
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        # vLLM's default fails the request; for Kintsugi a chunk that cannot be loaded is a miss.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra_config),
    }


def save_prompt(
    lead_token_ids: Sequence[int],
    chunk: Sequence[int],
    namespace: str,
    key: ChunkKey | None = None,
    priority: int = 0,
    context: Sequence[Sequence[int]] = (),
) -> Prompt:
    """Return the request of `save_request` as a prompt for a `LocalEngine`."""
    token_ids, params = save_request(lead_token_ids, chunk, namespace, key, context=context)
    return Prompt(token_ids, params, max_tokens=1, priority=priority)


def save_request(
    lead_token_ids: Sequence[int],
    chunk: Sequence[int],
    namespace: str,
    key: ChunkKey | None = None,
    ttl_s: float | None = None,
    asked_at_s: float = 0.0,
    context: Sequence[Sequence[int]] = (),
) -> tuple[TokenIds, KintsugiParams]:
    """Return prompt and parameters of the request that stores one copy of a chunk, prefilled after
    ``lead_token_ids``: the prefix, or prefix and context. With a ``key``, an engine of another chunk space
    declines the request. ``asked_at_s``: as in `KintsugiParams`; 0: now. ``context``: passages between the
    prefix and the chunk, instead of the space's context; then ``lead_token_ids`` is the prefix.

    One token follows the chunk: the connector claims the tokens that it computes, and vLLM must forward at
    least one token itself.
    """
    if not chunk:
        raise InvalidField("chunks", "holds an empty chunk; a chunk needs at least one token")
    ends = list(accumulate(map(len, (*context, chunk)), initial=len(lead_token_ids)))
    *passages, place = starmap(Span, pairwise(ends))
    params = KintsugiParams(
        namespace,
        Op.SAVE,
        (dataclasses.replace(place, key=key),),
        ttl_s=ttl_s,
        asked_at_s=asked_at_s or SaveTimes().now(namespace),
        context=tuple(passages),
    )
    return TokenIds.join(map(TokenIds.of, (lead_token_ids, *context, chunk, chunk[-1:]))), params

"""Wraps an engine's client to measure load, to find the accounting of answers that a stop string ends, and to
pass sampled answers to a watcher.

A sampled request makes vLLM compute logprobs that its caller does not get: vLLM's handlers return only what
the caller requested.

A prefill along a given answer uses no logits processor. Engines would have to load one at start, which
vLLM refuses with speculative decoding, and each of vLLM's two model runners needs a different kind.
Instead the answer follows the prompt, and vLLM reports the logprobs of prompt tokens that it computes itself.
After a blend these are the answer's, so one pass suffices. A full prefill would report those of the whole
prompt, which costs more than the prefill. So the prompt is prefilled once, and once more with the answer: the
second pass reads the prompt's blocks from the prefix cache.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from kintsugi.core.accounting import TICKET, TOLD, WEIGHTS_CHANGED
from kintsugi.core.request import PARAMS_KEY, KintsugiParams, Op
from kintsugi.engine.local import (
    Generation,
    Prompt,
    along_answer,
    logprobs_along,
    rows_along,
    tokens_prompt,
)
from kintsugi.engine.plugin import CONNECTOR

RAW = "raw_logprobs"
"""vLLM's default `logprobs_mode`."""
TOLD_S = 0.2
"""Maximum wait for an accounting that arrives after the first token, if that token ends the answer."""


MEMORY_TOKENS = 20_000.0
"""Prompt tokens after which the weight of an earlier rate is halved."""
MEMORY_S = 30.0


@dataclass(frozen=True)
class LoadStats:
    """An engine's load at one time, as plain numbers for routing and autoscaling."""

    running: int
    """Number of requests that have not ended, including waiting ones."""
    waiting: int
    """Number of requests without a first token."""
    waiting_tokens: int
    """Prompt tokens of waiting requests."""
    tokens_per_s: float
    """Prompt tokens per second while a request waited for its first token; 0: not measured yet."""
    busy_share: float = 0.0
    """Share of the time in which a request waited for its first token, weighted over about `MEMORY_S`."""


class LoadMeter:
    """Measures the load of one engine. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, int] = {}
        self._running: set[str] = set()
        self._counted_s = clock()
        self._busy_s = 0.0
        self._tokens = 0.0
        self._busy_share = 0.0

    def record_start(self, request_id: str, num_tokens: int) -> None:
        self._count_time()
        self._waiting[request_id] = num_tokens
        self._running.add(request_id)

    def record_first_token(self, request_id: str) -> None:
        """Note the first token of a request. Idempotent."""
        self._count_time()
        num_tokens = self._waiting.pop(request_id, 0)
        keep = math.exp2(-num_tokens / MEMORY_TOKENS)
        self._busy_s *= keep
        self._tokens = (self._tokens + num_tokens) * keep

    def record_end(self, request_id: str) -> None:
        """Note the end of a request. Idempotent."""
        self._count_time()
        self._waiting.pop(request_id, None)
        self._running.discard(request_id)

    def _count_time(self) -> None:
        """Add the time since the last call, which counts for the rate only while a request waits."""
        now_s = self._clock()
        elapsed_s = now_s - self._counted_s
        keep = math.exp(-elapsed_s / MEMORY_S)
        self._busy_share = self._busy_share * keep + (1 - keep) * bool(self._waiting)
        if self._waiting:
            self._busy_s += elapsed_s
        self._counted_s = now_s

    def stats(self) -> LoadStats:
        self._count_time()
        rate = self._tokens / self._busy_s if self._busy_s > 0 else 0.0
        waiting_tokens = sum(self._waiting.values())
        return LoadStats(len(self._running), len(self._waiting), waiting_tokens, rate, self._busy_share)


class Watcher(Protocol):
    """Interface of `quality.stream.Stream` for this module."""

    @property
    def positions(self) -> int:
        """Number of leading positions of an answer that `take` needs."""
        ...

    def note_arrival(self, priority: int) -> None:
        """Stop work that would delay a request of this priority if it arrived now."""
        ...

    def prepare_prompt(self, request_id: str, prompt: Prompt) -> Prompt: ...

    def take(self, prompt: Prompt, generation: Generation) -> bool: ...


class Notes(Protocol):
    """Interface of `openai.serving.CallState` for this module."""

    def note(self, output: Any) -> None: ...

    def note_failure(self, error: Exception) -> None: ...


class WatchedClient:
    """A `vllm.v1.engine.async_llm.AsyncLLM` that measures its load and passes sampled answers to a
    watcher."""

    def __init__(self, client: Any, load: LoadMeter) -> None:
        self.watcher: Watcher | None = None
        self.weights_changed: str | None = None
        """The reason in answers after the worker has found changed weights; None before."""
        self._client = client
        self._load = load
        self._logprobs_max = _logprobs_max(client.model_config)
        self._told = _ToldAccountings(getattr(client, "logger_manager", None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str, call: Notes | None = None, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """Generate as vLLM's method does, and note the outputs in ``call``. Closing the generator aborts the
        request."""
        watcher = self.watcher
        if watcher is not None:
            watcher.note_arrival(int(more.get("priority", 0)))
        # Not the request's id, which callers choose: they must not control whether they are sampled.
        sample_id = "" if watcher is None else uuid.uuid4().hex
        asked = None if watcher is None else self._prepare_blend(watcher, prompt, sampling, sample_id)
        if asked is not None:
            sampling.logprobs = asked.top_logprobs
        answer = None if watcher is None or asked is None else _Answer(watcher.positions, asked.top_logprobs)
        self._load.record_start(request_id, len(prompt.get("prompt_token_ids") or ()))
        ticket, has_begun = self._told.expect(sampling), False
        try:
            async with aclosing(self._client.generate(prompt, sampling, request_id, **more)) as outputs:
                async for output in outputs:
                    self._load.record_first_token(request_id)
                    if answer is not None:
                        answer.take(output.outputs[0], sampling.output_kind)
                    accounting = None
                    if output.finished:
                        if ticket and _is_stopped(output) and not output.kv_transfer_params:
                            is_first = not has_begun and len(output.outputs[0].token_ids) <= 1
                            output.kv_transfer_params = await self._told.find(ticket, is_first)
                        accounting = (output.kv_transfer_params or {}).get(PARAMS_KEY)
                        self._note_reason(accounting)
                    if watcher is not None and asked is not None and answer and output.finished:
                        watcher.take(asked, answer.generation(output, accounting))
                    has_begun = True
                    if call is not None:
                        call.note(output)
                    yield output
        except Exception as error:
            if call is not None:
                call.note_failure(error)
            raise
        finally:
            self._told.forget(ticket)
            self._load.record_end(request_id)

    def _note_reason(self, accounting: dict[str, Any] | None) -> None:
        reason = str((accounting or {}).get("reason") or "")
        if reason.startswith(f"{WEIGHTS_CHANGED}:"):
            self.weights_changed = reason

    def _prepare_blend(self, watcher: Watcher, prompt: Any, sampling: Any, sample_id: str) -> Prompt | None:
        """Return the prompt as the watcher prepares it; None for a request that is not sampled.

        Requests are not sampled if they set blend options, which calibration does not cover, if they request
        other logprobs, or if their answer follows a grammar, with which vLLM masks logits before it computes
        logprobs.
        """
        given = params_of(sampling)
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if given is None or not token_ids or sampling.n != 1:
            return None
        params = KintsugiParams.from_mapping(given)
        if params.op is not Op.BLEND or params.options.chosen:
            return None
        if sampling.logprobs is not None or sampling.logprob_token_ids or sampling.structured_outputs:
            return None
        plain = Prompt(token_ids, params)
        marked = watcher.prepare_prompt(sample_id, plain)
        return marked if 0 < marked.top_logprobs <= self._logprobs_max else None


def params_of(sampling: Any) -> dict[str, Any] | None:
    """Return what a request asks of the connector, as its caller wrote it; None if it asks for nothing."""
    given: dict[str, Any] | None = ((sampling.extra_args or {}).get("kv_transfer_params") or {}).get(
        PARAMS_KEY
    )
    return given


def _is_stopped(output: Any) -> bool:
    """Return whether a stop string has ended an answer."""
    return any(isinstance(one.stop_reason, str) for one in output.outputs)


class _ToldAccountings:
    """Accountings of running requests with stop strings, whose final output has no accounting. The
    scheduler's side reports them. Used in the client's event loop."""

    def __init__(self, manager: Any | None) -> None:
        """``manager``: vLLM's `StatLoggerManager`; None if statistics are off, so that nothing is
        reported."""
        self._expected: dict[str, asyncio.Future[dict[str, Any]]] = {}
        """Expected accountings by the tickets of running requests."""
        if manager is not None:
            manager.stat_loggers.append(_told_logger(self._take))

    def expect(self, sampling: Any) -> str:
        """Add a ticket to a request with stop strings, and return it; empty if the request has no stop
        strings or no accounting. Removes a ticket that the caller sent."""
        extra = dict(sampling.extra_args or {})
        if extra.pop(TICKET, None) is not None:
            sampling.extra_args = extra
        params = params_of(sampling)
        if not sampling.stop or params is None or params.get("op") == Op.OFF:
            return ""
        ticket = uuid.uuid4().hex
        sampling.extra_args = {**extra, TICKET: ticket}
        self._expected[ticket] = asyncio.get_running_loop().create_future()
        return ticket

    def _take(self, ticket: str, accounting: dict[str, Any]) -> None:
        told = self._expected.get(ticket)
        if told is not None and not told.done():  # several answers share one ticket
            told.set_result(accounting)

    async def find(self, ticket: str, is_first: bool) -> dict[str, Any] | None:
        """Return `kv_transfer_params` of a request that a stop string has ended; None if none were reported.
        Of several answers, the first reported ones. ``is_first``: the first token has ended the answer, so
        wait for the report."""
        told = self._expected[ticket]
        if is_first:
            await asyncio.wait((told,), timeout=TOLD_S)
        return {PARAMS_KEY: told.result()} if told.done() else None

    def forget(self, ticket: str) -> None:
        """Drop the ticket of a request that has ended."""
        self._expected.pop(ticket, None)


def _told_logger(take: Callable[[str, dict[str, Any]], None]) -> Any:
    """Make a logger of vLLM's statistics that passes reported accountings to ``take``, in the client's event
    loop."""
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    class ToldLogger(AggregateStatLoggerBase):  # type: ignore[misc]
        def __init__(self) -> None:
            """Take no configuration, unlike vLLM's loggers."""

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            counted = None if scheduler_stats is None else scheduler_stats.kv_connector_stats
            counted = (counted or {}).get(
                CONNECTOR, counted
            ) or {}  # MultiConnector keeps each connector's apart
            for ticket, accounting in (counted.get(TOLD) or {}).items():
                take(ticket, accounting)

        def log_engine_initialized(self) -> None:
            """Log nothing."""

    return ToldLogger()


def _logprobs_max(model_config: Any) -> int:
    """Return how many logprobs a request may ask for; 0 if vLLM reports processed logprobs."""
    if model_config.logprobs_mode != RAW:
        return 0
    known = int(model_config.max_logprobs)
    return known if known >= 0 else int(model_config.get_vocab_size())


@dataclass
class _Answer:
    """The leading positions of an answer, which are compared."""

    positions_max: int
    top_logprobs: int
    token_ids: list[int] = field(default_factory=list)
    steps: list[dict[int, float]] = field(default_factory=list)

    def take(self, completion: Any, kind: Any) -> None:
        """Add the tokens of one of vLLM's outputs. It repeats earlier tokens unless it is a delta."""
        if kind.name != "DELTA":
            self.token_ids.clear()
            self.steps.clear()
        room = self.positions_max - len(self.token_ids)
        rows = list(islice(completion.logprobs or (), room))
        self.steps += [_best(row, self.top_logprobs) for row in rows]
        self.token_ids += islice(completion.token_ids, len(rows))

    def __bool__(self) -> bool:
        return bool(self.steps)

    def generation(self, output: Any, accounting: dict[str, Any] | None) -> Generation:
        return Generation(
            token_ids=self.token_ids,
            top_logprobs=self.steps,
            finish_reason=output.outputs[0].finish_reason,
            num_cached_tokens=output.num_cached_tokens or 0,
            accounting=accounting,
        )


def _best(entries: Mapping[int, Any], limit: int) -> dict[int, float]:
    """Return the logprobs of the ``limit`` most likely tokens. vLLM adds the drawn token if it is not among
    them."""
    found = {int(token): float(entry.logprob) for token, entry in entries.items()}
    return {token: found[token] for token in sorted(found, key=lambda token: -found[token])[:limit]}


async def measure(client: Any, prompt: Prompt, request_id: str, priority: int) -> Generation:
    """Run an audit or a trial if the prompt's parameters ask for one, else a full prefill. Trials and full
    prefills are computed along `prompt.forced` if it is set."""
    params = prompt.params
    run = prefill_in_full if params is None else audit_chunk if params.op is Op.AUDIT else blend_trial
    return await run(client, prompt, request_id, priority)


async def prefill_in_full(client: Any, prompt: Prompt, request_id: str, priority: int) -> Generation:
    """Compute the model's own distributions after the prompt, and along `prompt.forced` if it is set.

    Blends nothing, and reads only blocks from the prefix cache that this call has computed. An engine without
    a prefix cache reports only the first position: the second pass would repeat the prompt, with logprobs of
    all its tokens.
    """
    # A unique salt: an equal prompt may have left blended blocks.
    salt, forced = uuid.uuid4().hex, list(prompt.forced or ())
    last = await _run_prefill(client, prompt, salt, request_id, priority, skip_reading_prefix_cache=True)
    rows = list(last.outputs[0].logprobs)
    if len(forced) > 1 and client.vllm_config.cache_config.enable_prefix_caching:
        longer = replace(prompt, token_ids=[*prompt.token_ids, *forced[:-1]])
        again = logprobs_along(longer)
        last = await _run_prefill(client, longer, salt, f"{request_id}-forced", priority, **again)
        rows += rows_along(last, forced)[1:]
    return _along(prompt, last, rows)


async def blend_trial(client: Any, prompt: Prompt, request_id: str, priority: int) -> Generation:
    """Blend the prompt as its trial says, and return the distributions along `prompt.forced`, with the
    blend's accounting."""
    asked = along_answer(prompt)
    last = await _run_trial(client, asked, request_id, priority, **logprobs_along(asked))
    return _along(prompt, last, rows_along(last, prompt.forced or ()))


def _along(prompt: Prompt, last: Any, rows: Sequence[Any]) -> Generation:
    """Return the distributions ``rows`` along the prompt's forced tokens. ``last``: vLLM's output."""
    steps = [_best(row, prompt.top_logprobs) for row in rows]
    token_ids = list(prompt.forced or last.outputs[0].token_ids)[: len(steps)]
    accounting = (last.kv_transfer_params or {}).get(PARAMS_KEY)
    return _Answer(len(steps), prompt.top_logprobs, token_ids, steps).generation(last, accounting)


async def _run_trial(client: Any, prompt: Prompt, request_id: str, priority: int, **more: Any) -> Any:
    """Run a prefill with the prompt's own parameters, in its namespace."""
    assert prompt.params is not None
    extra = {"kv_transfer_params": prompt.params.to_mapping()}
    salt = prompt.params.namespace
    return await _run_prefill(client, prompt, salt, request_id, priority, extra_args=extra, **more)


async def audit_chunk(client: Any, prompt: Prompt, request_id: str, priority: int) -> Generation:
    """Run the prompt's audit. Its KV is exact, so the tenant's other requests may use it."""
    last = await _run_trial(client, prompt, request_id, priority)
    return _Answer(0, 0).generation(last, (last.kv_transfer_params or {}).get(PARAMS_KEY))


async def _run_prefill(
    client: Any, prompt: Prompt, salt: str, request_id: str, priority: int, **more: Any
) -> Any:
    """Run a prefill that draws one token. Returns vLLM's last output."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=prompt.top_logprobs,
        ignore_eos=True,
        # Detokenizing 20 tokens at every position of a prompt would block the event loop.
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **more,
    )
    tokens = tokens_prompt(replace(prompt, cache_salt=salt))
    async with aclosing(client.generate(tokens, sampling, request_id, priority=priority)) as outputs:
        async for output in outputs:
            if output.finished:
                return output
    raise AssertionError("vLLM neither ended the answer nor raised")

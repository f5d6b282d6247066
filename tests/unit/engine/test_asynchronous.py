"""An engine's requests, errors and end, over a stand-in for vLLM's client."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from vllm import __version__ as vllm_version
from vllm.exceptions import VLLMValidationError

from kintsugi import __version__
from kintsugi.core.errors import (
    InvalidField,
    KintsugiError,
    ResourceExhausted,
    Unavailable,
    UnknownField,
)
from kintsugi.core.exchange import EngineDelta, EngineInfo, EngineRequest, OpenAICall, Usage
from kintsugi.core.gate import GateState
from kintsugi.core.request import KintsugiParams, Op
from kintsugi.core.spaces import Span, TokenIds
from kintsugi.engine.asynchronous import (
    AsyncEngine,
    AsyncSpec,
    EngineParts,
    arguments_for,
)
from kintsugi.engine.local import Prompt
from kintsugi.engine.scheduler.gate import Gate
from kintsugi.engine.scheduler.hashing import split_salt
from kintsugi.gateway.addresses import free_port
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.store.client.ram import RamStore
from tests.fakes.reports import BINDING, VERSIONS, open_report, report_of

PROMPT = TokenIds.of([0, 5, 70_000])
ACCOUNTING = {"outcome": "declined", "reason": "no_chunk_cached"}
SAVED = {"outcome": "saved"}


class EngineDeadError(Exception):
    """Named as vLLM's."""


class Overloaded(Exception):
    http_status = 503


class ScriptedClient:
    """Answers with one token per item of the script; an exception is raised."""

    errored = False
    output_handler = None

    def __init__(self, script: Sequence[int | Exception] = (7, 8), accounting: Any = ACCOUNTING) -> None:
        self.script = script
        self.accounting = accounting
        self.asked: list[tuple[Any, Any, str, dict[str, Any]]] = []
        self.running = 0
        self.model_config = SimpleNamespace(
            max_model_len=16,
            logprobs_mode="raw_logprobs",
            max_logprobs=20,
            model=str(bundled_checkpoint()),
            revision=None,
            trust_remote_code=False,
            get_diff_sampling_param=dict,
        )
        self.vllm_config = SimpleNamespace(model_config=self.model_config)
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(ctx=SimpleNamespace(term=lambda: None)))

        self.logprobs: list[dict[int, Any]] | None = None

    def shutdown(self) -> None:
        return None

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        self.asked.append((prompt, sampling, request_id, more))
        self.running += 1
        try:
            for index, item in enumerate(self.script):
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                finished = index == len(self.script) - 1
                piece = SimpleNamespace(
                    token_ids=[item],
                    text=f"{item} ",
                    finish_reason="length" if finished else None,
                    logprobs=self.logprobs,
                )
                yield SimpleNamespace(
                    outputs=[piece],
                    finished=finished,
                    kv_transfer_params={"kintsugi": self.accounting} if finished else None,
                    num_cached_tokens=2,
                    prompt_token_ids=prompt["prompt_token_ids"],
                )
        finally:
            self.running -= 1


def engine_over(client: ScriptedClient, **values: Any) -> AsyncEngine:
    spec = AsyncSpec(str(bundled_checkpoint()), "mine", "grpc://127.0.0.1:1", **values)
    return AsyncEngine(spec, EngineParts(client, RamStore(), Gate.fixed(BINDING, GateState()), None))


def request(**changes: Any) -> EngineRequest:
    values = {"sampling": {"max_tokens": 2}, **changes}
    return EngineRequest("r", values.pop("prompt", PROMPT), KintsugiParams("acme"), **values)


async def answer(engine: AsyncEngine, asked: EngineRequest) -> list[EngineDelta]:
    async with aclosing(engine.generate(asked)) as deltas:
        return [delta async for delta in deltas]


def test_an_answer_passes_in_pieces_and_ends_with_its_accounting() -> None:
    client = ScriptedClient()
    engine = engine_over(client)
    first, last = asyncio.run(answer(engine, request(priority=3, trace={"traceparent": "00-1"})))
    assert first == EngineDelta((7,), "7 ")
    assert last == EngineDelta((8,), "8 ", "length", ACCOUNTING, Usage(3, 2, 2))
    ((prompt, sampling, request_id, more),) = client.asked
    assert prompt["prompt_token_ids"] == [0, 5, 70_000]
    assert prompt["cache_salt"] == "acme"
    assert sampling.extra_args == {"kv_transfer_params": KintsugiParams("acme").to_mapping()}
    assert request_id.startswith("r-")
    assert more == {"trace_headers": {"traceparent": "00-1"}, "priority": 3}


def test_a_measurement_has_a_salt_of_its_own_and_a_scored_token_its_logprob() -> None:
    client = ScriptedClient()
    client.logprobs = [{5: SimpleNamespace(logprob=-0.25), 7: SimpleNamespace(logprob=-1.5)}]
    first, last = asyncio.run(answer(engine_over(client), request(measurement="m1", scored_token=5)))
    assert (first.logprob, last.logprob) == (-0.25, None)
    ((prompt, sampling, _, _),) = client.asked
    assert split_salt(prompt["cache_salt"]) == ("acme", "m1")
    assert sampling.logprob_token_ids == [5]


def test_a_probe_fails_once_the_core_has_ended() -> None:
    client = ScriptedClient()
    engine = engine_over(client)
    port = free_port("127.0.0.1", 29_780, 16)
    engine.serve_metrics("127.0.0.1", port)
    url = f"http://127.0.0.1:{port}"
    try:
        assert httpx.get(f"{url}/readyz").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200
        client.errored = True
        answer = httpx.get(f"{url}/readyz")
        assert answer.status_code == 503
        assert answer.text == "the engine's process has ended; a new engine starts\n"
    finally:
        asyncio.run(engine.close())


def test_requests_of_one_id_differ_in_the_engine() -> None:
    client = ScriptedClient()
    engine = engine_over(client)
    for _ in range(2):
        asyncio.run(answer(engine, request()))
    assert len({request_id for _, _, request_id, _ in client.asked}) == 2


def test_an_answer_that_is_left_ends_in_the_engine() -> None:
    client = ScriptedClient()
    engine = engine_over(client)

    async def leave() -> None:
        async with aclosing(engine.generate(request())) as deltas:
            await anext(deltas)
            assert (client.running, engine.stats().running) == (1, 1)

    asyncio.run(leave())
    assert (client.running, engine.stats().running) == (0, 0)


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (EngineDeadError(), Unavailable, "ended while it answered"),
        (Overloaded(), ResourceExhausted, "queue is full"),
        (VLLMValidationError("the grammar is wrong"), InvalidField, "the grammar is wrong"),
        (ValueError("a defect"), ValueError, "a defect"),
        (RuntimeError("a defect"), RuntimeError, "a defect"),
    ],
)
def test_vllms_errors_become_ours(error: Exception, kind: type[Exception], match: str) -> None:
    for script in ((error,), (7, error)):
        engine = engine_over(ScriptedClient(script))
        with pytest.raises(kind, match=match):
            asyncio.run(answer(engine, request()))
        assert engine.stats().running == 0


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"sampling": {"temprature": 0.5}}, UnknownField, "temperature"),
        ({"sampling": {"temperature": -1.0}}, InvalidField, "sampling: "),
        ({"prompt": TokenIds()}, InvalidField, "prompt_token_ids"),
        ({"prompt": TokenIds.of([1] * 16)}, InvalidField, "prompt_token_ids"),
        ({"fingerprint": "ab" * 32}, Unavailable, "another model"),
    ],
)
def test_a_bad_request_is_refused_before_it_is_submitted(
    changes: dict[str, Any], kind: type[KintsugiError], field: str
) -> None:
    client = ScriptedClient()
    with pytest.raises(kind, match=field):
        asyncio.run(answer(engine_over(client), request(**changes)))
    assert client.asked == []


AUDIT = KintsugiParams("acme", Op.AUDIT, (Span(1, 3),))


def test_nobody_outside_the_engine_asks_for_an_audit() -> None:
    client = ScriptedClient()
    engine = engine_over(client)
    with pytest.raises(InvalidField, match="audit is for the engine itself"):
        asyncio.run(answer(engine, dataclasses.replace(request(), params=AUDIT)))

    async def ask() -> None:
        await anext(engine.openai(OpenAICall("o", "/v1/completions", {}, AUDIT)))

    with pytest.raises(InvalidField, match="audit is for the engine itself"):
        asyncio.run(ask())
    assert client.asked == []


def test_engines_that_keep_callers_from_auditing_accept_audits() -> None:
    spec = AsyncSpec(str(bundled_checkpoint()), "m", "grpc://127.0.0.1:1")
    assert arguments_for(spec)["kv_transfer_config"].kv_connector_extra_config["audits"] is True


def test_an_audit_is_behind_all_requests_and_no_load() -> None:
    said = {"outcome": "audited", "audit": {"codec": "raw", "key_errors": [0.0], "value_errors": [0.0]}}
    client = ScriptedClient((7,), said)
    engine = engine_over(client)
    audited = asyncio.run(engine.measure(Prompt([0, 5, 6, 6], AUDIT), 9))
    assert audited.accounting == said
    ((prompt, sampling, _, more),) = client.asked
    assert (prompt["prompt_token_ids"], prompt["cache_salt"]) == ([0, 5, 6, 6], "acme")
    assert sampling.extra_args["kv_transfer_params"] == AUDIT.to_mapping()
    assert not sampling.skip_reading_prefix_cache, "the connector declines such requests"
    assert more["priority"] == 9


def test_chunks_are_saved_one_by_one_and_fail_one_by_one() -> None:
    client = ScriptedClient((7,), SAVED)
    chunks = [TokenIds.of([5, 6]), TokenIds(), TokenIds.of(range(20))]
    outcomes = asyncio.run(engine_over(client).save("s", "acme", chunks, 9, 60.0))
    assert [outcome.is_saved for outcome in outcomes] == [True, False, False]
    assert "empty" in outcomes[1].reason
    ((prompt, sampling, _, more),) = client.asked
    assert prompt["prompt_token_ids"] == [0, 5, 6, 6]
    wanted = sampling.extra_args["kv_transfer_params"]["kintsugi"]
    assert (wanted["op"], wanted["spans"]) == ("save", [[1, 3]])
    assert wanted["ttl_s"] == 60.0
    assert more["priority"] == 9


def test_with_a_context_both_copies_are_saved_or_the_chunk_has_failed() -> None:
    context: dict[str, Any] = {"context_token_ids": [3, 4]}
    for more, spans in (
        ({}, [[[3, 5]], [[1, 3]]]),
        ({"plain_copies": False}, [[[3, 5]]]),
    ):
        client = ScriptedClient((7,), SAVED)
        engine = engine_over(client, extra_config={**context, **more})
        (outcome,) = asyncio.run(engine.save("s", "acme", [TokenIds.of([5, 6])]))
        assert outcome.is_saved
        prompts = [list(prompt["prompt_token_ids"]) for prompt, *_ in client.asked]
        assert prompts == [[0, 3, 4, 5, 6, 6], [0, 5, 6, 6]][: len(spans)]
        wanted = [sampling.extra_args["kv_transfer_params"]["kintsugi"] for _, sampling, *_ in client.asked]
        assert [one["spans"] for one in wanted] == spans
        info = asyncio.run(engine.info())
        assert (info.context_token_ids, info.plain_copies) == ((3, 4), len(spans) == 2)
    # The plain copy of this chunk fits, what is prepared does not.
    client = ScriptedClient((7,), SAVED)
    (outcome,) = asyncio.run(
        engine_over(client, extra_config=context).save("s", "acme", [TokenIds.of(range(13))])
    )
    assert not outcome.is_saved
    assert "exceed the model's 16" in outcome.reason


def info_of(state: GateState, changed: str | None = None) -> EngineInfo:
    engine = engine_over(ScriptedClient())
    engine.gate.state = state
    engine.watched.weights_changed = changed
    return asyncio.run(engine.info())


def test_an_engine_says_what_is_open_and_how_far_the_evidence_is() -> None:
    opened = info_of(GateState(report=open_report(rungs=2), versions=VERSIONS))
    assert (opened.blending, opened.selector, opened.ratio) == ("on", "query", 0.4)
    assert (opened.ratios_min, opened.progress.state) == ({"query": 0.4}, "open")
    learning = info_of(GateState(report=report_of(), versions=VERSIONS))
    assert learning.blending == "learning: no prompt was measured yet"
    assert (learning.ratio, learning.ratios_min, learning.progress.state) == (None, {}, "learning")
    untested = info_of(GateState())
    assert (untested.blending, untested.ratio, untested.ratios_min) == ("on", 0.15, None)
    assert (untested.version, untested.vllm) == (__version__, vllm_version)


@pytest.mark.parametrize("state", [GateState(), GateState(report=open_report(), versions=VERSIONS)])
def test_an_engine_that_cannot_blend_says_so_whatever_is_open(state: GateState) -> None:
    info = info_of(state, "weights_changed: load_weights was called")
    assert (info.blending, info.ratio) == ("weights_changed: load_weights was called", None)
    assert (info.progress.state, info.progress.detail) == ("closed", info.blending)


def test_an_engine_without_a_report_says_why() -> None:
    info = info_of(GateState("report_unavailable", "no route; it is read again later"))
    assert info.blending == "report_unavailable: no route; it is read again later"
    assert info.progress.state == "closed"


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_engine_that_is_gone_answers_nobody(is_closed: bool) -> None:
    client = ScriptedClient()
    engine = engine_over(client)
    call = OpenAICall("o", "/v1/completions", {}, KintsugiParams("acme"))

    async def ask() -> None:
        assert (await engine.info()).model == "mine"
        if is_closed:
            await engine.close()
            await engine.close()
        else:
            client.errored = True
        for answering in (lambda: engine.generate(request()), lambda: engine.openai(call)):
            with pytest.raises(Unavailable):
                await anext(answering())
        with pytest.raises(Unavailable):
            await engine.save("s", "acme", [PROMPT])
        with pytest.raises(Unavailable):
            await engine.info()

    asyncio.run(ask())


async def told_of_end(*, stopped: bool) -> bool:
    """Whether somebody is told, once vLLM's task has ended by itself or was cancelled."""

    async def read_answers() -> None:
        await (asyncio.Event().wait() if stopped else asyncio.sleep(0))

    engine, told = AsyncEngine.__new__(AsyncEngine), asyncio.Event()
    task = asyncio.create_task(read_answers())
    engine.client = SimpleNamespace(output_handler=task)
    engine.when_ended(told.set)
    await asyncio.sleep(0)
    if stopped:
        task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    return told.is_set()


def test_the_end_of_a_core_is_told_unless_it_was_asked_for() -> None:
    assert asyncio.run(told_of_end(stopped=False))
    assert not asyncio.run(told_of_end(stopped=True))

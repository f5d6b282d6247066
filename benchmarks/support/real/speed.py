"""Time to first token through `kintsugi serve` and OpenAI's own client, full prefill and blend in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from benchmarks.support.engines import say
from benchmarks.support.real.corpus import PassageSet
from benchmarks.support.real.engine import CHUNK_END, MODEL_TOKENS_MAX, Clock
from benchmarks.support.real.records import Records
from benchmarks.support.real.rows import Configuration
from benchmarks.support.servers import NAMESPACE, Server, Setting, our_server
from kintsugi.core.accounting import ACCOUNTING_KEY, Outcome
from kintsugi.core.errors import NotBlendable, Unavailable
from kintsugi.core.plan import Selection
from kintsugi.core.request import PARAMS_KEY
from kintsugi.sdk.client import Client, ClientOptions

ANSWER_TOKENS = 8
TIMEOUT_S = 600.0
FULL, BLEND = "full", "blend"


def setting_of(configuration: Configuration, context: str) -> Setting:
    """A service that blends every request with the configuration, its chunks prepared after ``context``,
    which is the setting `model.expert.context`.

    It runs with default settings on all cores, with one compute thread. Prefix caching is off, because
    neither method may find the KV that storing a passage leaves in the cache.
    """
    return Setting(
        shape="real",
        max_model_len=MODEL_TOKENS_MAX,
        kv_cache_bytes=1 << 30,
        ratio=configuration.selection.ratio,
        loading_controller=False,
        is_pinned=False,
        ram_gib=1.0,
        ssd_gib=8.0,
        expert=expert_of(configuration.selection),
        model={} if context == "none" else {"expert": {"context": context}},
        vllm={"enable_prefix_caching": False},
    )


def expert_of(selection: Selection) -> dict[str, Any]:
    """Settings of `engines.expert` with which every request uses a selection. The layers whose queries select
    tokens cannot be set: the fusor's own serve."""
    return {"selector": selection.selector, "check_layer": selection.check_layer}


def measure_ttft(
    model: str,
    configuration: Configuration,
    context: str,
    sets: Sequence[PassageSet],
    warm_up: PassageSet,
    records: Records,
    clock: Clock,
) -> bool:
    """Measure the prompts that the records lack, one after the other. Returns whether all are measured.

    Each prompt is sent twice, blended and prefilled in full, in turns first. The answers to ``warm_up``
    prepare kernels and are not counted.
    """
    left = [one for one in sets if _key(configuration, one) not in records]
    if not left or clock.is_over:
        return not left
    with our_server(Path(model), setting_of(configuration, context)) as server, _client(server) as client:
        _ask_both(server, client, warm_up)
        for one in left:
            if clock.is_over:
                return False
            values = _ask_both(server, client, one)
            records.add(_key(configuration, one), values)
            say(f"TTFT of set {one.number}: {values[FULL]:.2f} s in full, {values[BLEND]:.2f} s blended")
    return True


def _key(configuration: Configuration, one: PassageSet) -> tuple[str | int, ...]:
    return ("ttft", configuration.name, one.number)


def _client(server: Server) -> openai.OpenAI:
    endpoint = server.endpoint
    return openai.OpenAI(
        base_url=endpoint.url,
        api_key="none",
        default_headers=endpoint.headers,
        max_retries=0,
        timeout=TIMEOUT_S,
    )


def _ask_both(server: Server, client: openai.OpenAI, one: PassageSet) -> dict[str, float]:
    """Seconds to the first token by method, and the blend's cost. The passages are stored first."""
    with Client(server.grpc, NAMESPACE, options=ClientOptions(timeout_s=TIMEOUT_S)) as sdk:
        puts = sdk.put_chunks([text + CHUNK_END for text in one.passages])
    if failed := [put for put in puts if put.state == "failed"]:
        raise Unavailable(f"a passage of set {one.number} was not stored: {failed[0]}")
    methods = (FULL, BLEND) if one.number % 2 else (BLEND, FULL)
    values: dict[str, float] = {}
    for method in methods:
        values[method], accounting = _ask(client, server.endpoint.model, one, method)
        if method == BLEND:
            values["cost"] = _blended_cost(accounting)
    return values


def _ask(
    client: openai.OpenAI, model: str, one: PassageSet, method: str
) -> tuple[float, dict[str, Any] | None]:
    """Seconds from the request to its first token, and the accounting of the answer."""
    content = "".join(text + CHUNK_END for text in one.passages) + "\n" + one.open_question
    began_s = time.perf_counter()
    first_s, accounting = None, None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        extra_body={PARAMS_KEY: {"op": "off"}} if method == FULL else None,
    )
    for event in stream:
        if first_s is None and event.choices and event.choices[0].delta.content:
            first_s = time.perf_counter() - began_s
        accounting = (getattr(event, ACCOUNTING_KEY, None) or {}).get(PARAMS_KEY) or accounting
    if first_s is None:
        raise Unavailable(f"set {one.number} had no answer ({method})")
    return first_s, accounting


def _blended_cost(accounting: dict[str, Any] | None) -> float:
    found = accounting or {}
    if found.get("outcome") != Outcome.BLENDED.value or found.get("chunks_missed"):
        reason = str(found.get("reason") or found.get("outcome") or "no_answer")
        raise NotBlendable(reason, "the service did not blend a prompt whose passages it stored")
    return float(found["cost"])

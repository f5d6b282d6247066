"""A namespace beside one that it shares, in a real engine: what is shared is loaded, and nothing else of
anybody else's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.local import Generation, LocalEngine
from kintsugi.store.client.ram import RamStore
from tests.integration.engine.conftest import (
    PREFIX,
    EngineSlot,
    Rag,
    ask_cold,
    chunks_of,
    max_dlogprob,
    rag,
)

pytestmark = pytest.mark.engine("tiny-llama")

SHARED, ADA, BOB = "team", "team/users/ada", "team/users/bob"


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> LocalEngine:
    engine = engine_slot.get("tiny-llama")
    own, other, shared = chunks_of(70, 71, 200, seed=17)
    for namespace, chunk in ((ADA, own), (BOB, other), (SHARED, shared)):
        engine.save(PREFIX, [chunk], namespace)
    return engine


def ask(
    engine: LocalEngine, prompt: Rag, namespace: str, shared: str = "", *, spans: bool = True
) -> Generation:
    params = KintsugiParams(namespace, spans=prompt.spans if spans else None, ratio=1.0, shared=shared)
    return ask_cold(engine, prompt.token_ids, params)


@pytest.mark.parametrize("spans", [True, False])
def test_own_and_shared_chunks_are_blended_in_one_prompt(engine: LocalEngine, spans: bool) -> None:
    own, other, shared = chunks_of(70, 71, 200, seed=17)
    prompt = rag(shared, own, other)
    full = ask_cold(engine, prompt.token_ids)
    blended = ask(engine, prompt, ADA, SHARED, spans=spans)
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended"
    assert (blended.accounting["chunks_hit"], blended.accounting["tokens_hit"]) == (2, 270)
    assert blended.token_ids == full.token_ids
    assert max_dlogprob(full, blended) <= 0.01


def test_shared_kv_is_what_the_users_own_would_be(engine: LocalEngine) -> None:
    own, _, shared = chunks_of(70, 71, 200, seed=17)
    prompt = rag(shared)
    loaded = dataclasses.replace(prompt.params(0.0), namespace=BOB, shared=SHARED)
    reused = ask_cold(engine, prompt.token_ids, loaded)
    assert reused.accounting is not None
    assert reused.accounting["tokens_recomputed"] == 0
    assert max_dlogprob(ask_cold(engine, prompt.token_ids), reused) <= 0.01
    alone = ask(engine, rag(own), BOB, SHARED)
    assert alone.accounting is not None
    assert alone.accounting["chunks_hit"] == 0


def test_without_sharing_a_namespace_is_alone(engine: LocalEngine) -> None:
    shared = chunks_of(70, 71, 200, seed=17)[2]
    answer = ask(engine, rag(shared), ADA)
    assert answer.accounting is not None
    assert answer.accounting["chunks_hit"] == 0


def test_a_lost_shared_chunk_costs_a_prefill(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key is another than the span's; the pass restarts without it."""
    own, _, shared = chunks_of(70, 71, 200, seed=17)
    prompt = rag(own, shared)
    full = ask_cold(engine, prompt.token_ids)
    stream = RamStore.stream

    def stream_without(store: RamStore, namespace: str, keys: Sequence[ChunkKey], *rest: Any) -> Any:
        if namespace == SHARED:
            store.delete(SHARED, keys)
        return stream(store, namespace, keys, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RamStore, "stream", stream_without)
        answer = ask(engine, prompt, ADA, SHARED)
    engine.save(PREFIX, [shared], SHARED)
    assert answer.accounting is not None
    assert (answer.accounting["outcome"], answer.accounting["restarts"]) == ("blended", 1)
    assert answer.token_ids == full.token_ids

"""Beside vLLM's other connectors: what they keep of a blend is never found as exact KV.

vLLM's offloading needs a GPU, or a process that poses as having one (`KINTSUGI_POSED=1`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kintsugi.engine.local import LocalEngine, transfer_config
from tests.integration.engine.conftest import (
    NAMESPACE,
    PATIENT,
    PREFIX,
    UNCALIBRATED,
    EngineSlot,
    ask,
    ask_cold,
    chunks_of,
    is_posed,
    max_dlogprob,
    rag,
    random_tokens,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_posed(), reason="vLLM's offloading needs a GPU, or KINTSUGI_POSED=1"),
]

EXACT = 0.01
BLOCK = 16


def offloading(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20, **extra},
    }


def start(slot: EngineSlot, store: str, other: dict[str, Any], role: str = "kv_both") -> LocalEngine:
    from vllm.config import KVTransferConfig

    ours = {**transfer_config({"store": store, **PATIENT, **UNCALIBRATED}), "kv_role": role}
    both = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [ours, other]},
    )
    return slot.get("tiny-llama", kv_transfer_config=both, block_size=BLOCK)


@pytest.mark.composed("offloading")
def test_vllms_offloading_keeps_blends_and_exact_kv_apart(engine_slot: EngineSlot) -> None:
    engine = start(engine_slot, "ram://beside", offloading())
    chunks = chunks_of(50, 70, seed=23)
    assert all(saved.is_saved for saved in engine.save(PREFIX, chunks, NAMESPACE))
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended", blended.accounting
    assert max_dlogprob(full, blended) > 0.1, "or nothing shows which KV was found"
    ask_cold(engine, random_tokens(40, 3))  # its steps let the transfers end
    plain = ask_cold(engine, prompt.token_ids)
    assert plain.num_cached_tokens >= BLOCK, "nothing was loaded from the host"
    assert plain.token_ids == full.token_ids
    assert max_dlogprob(full, plain) <= EXACT
    again = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert again.token_ids == blended.token_ids
    assert max_dlogprob(blended, again) <= EXACT


@pytest.fixture
def shared_folder(tmp_path: Path) -> dict[str, Any]:
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    return offloading(spec_name="TieringOffloadingSpec", secondary_tiers=[tier])


@pytest.mark.composed("disaggregated prefill")
def test_a_blend_is_handed_from_prefill_to_decode(
    engine_slot: EngineSlot, shared_folder: dict[str, Any]
) -> None:
    chunks = chunks_of(50, 70, seed=27)
    prompt = rag(*chunks)
    prefill = start(engine_slot, "ram://disaggregated", shared_folder, "kv_producer")
    assert all(saved.is_saved for saved in prefill.save(PREFIX, chunks, NAMESPACE))
    full = ask_cold(prefill, prompt.token_ids)
    blended = ask_cold(prefill, prompt.token_ids, prompt.params(0.0))
    assert max_dlogprob(full, blended) > 0.1
    ask_cold(prefill, random_tokens(40, 3))
    decode = start(engine_slot, "ram://disaggregated", shared_folder, "kv_consumer")
    taken = ask(decode, prompt.token_ids, prompt.params(0.0))
    assert taken.accounting is not None
    assert taken.accounting["reason"].startswith("kv_consumer: ")
    assert taken.num_cached_tokens >= len(prompt.token_ids) // BLOCK * BLOCK - BLOCK
    assert taken.token_ids == blended.token_ids
    assert max_dlogprob(blended, taken) <= EXACT
    plain = ask(decode, prompt.token_ids)
    assert plain.token_ids == full.token_ids
    assert max_dlogprob(full, plain) <= EXACT

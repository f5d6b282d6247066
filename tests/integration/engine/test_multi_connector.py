"""Beside a connector that stores KV by its tokens, as vLLM's ExampleConnector, nothing is blended."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi.engine.local import LocalEngine, transfer_config
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.integration.engine.conftest import (
    NAMESPACE,
    PATIENT,
    PREFIX,
    UNCALIBRATED,
    EngineSlot,
    ask_cold,
    chunks_of,
    rag,
)

pytestmark = pytest.mark.engine


def test_a_wrapped_connector_declines_by_name(engine_slot: EngineSlot, tmp_path: Any) -> None:
    from vllm.config import KVTransferConfig

    engine_slot.close()
    config = {"store": "ram://wrapped", **PATIENT, **UNCALIBRATED}
    children = [
        transfer_config(config),
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
    ]
    wrapper = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": children},
    )
    engine = LocalEngine.start(
        make_checkpoint_once("tiny-llama"),
        kv_transfer_config=wrapper,
        dtype="bfloat16",
        max_model_len=4096,
        block_size=32,
        kv_cache_memory_bytes=128 << 20,
    )
    try:
        prompt = rag(*chunks_of(50, 60, seed=9))
        full = ask_cold(engine, prompt.token_ids)
        answer = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
        assert answer.accounting is not None
        assert answer.accounting["outcome"] == "declined"
        assert answer.accounting["reason"].startswith("multi_connector: MultiConnector passes blocks")
        assert answer.token_ids == full.token_ids
        (saved,) = engine.save(PREFIX, [prompt.token_ids[1:40]], NAMESPACE)
        assert (saved.accounting or {})["reason"].startswith("multi_connector: ")
    finally:
        engine.close()

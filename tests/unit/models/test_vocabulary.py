"""The tokenizer loses nothing and every id means something."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kintsugi.models.passages import BUNDLED_QUESTIONS, read_bundled_passages
from tests.fakes.random_models.vocabulary import BOS_ID, EOS_ID, train_tokenizer

TOKENIZER = train_tokenizer(1024, 8192)


@given(st.text().filter(lambda text: "<s>" not in text and "</s>" not in text))
@settings(max_examples=200, deadline=None)
def test_any_text_round_trips(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    assert TOKENIZER.decode(ids) == text


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tmp_path)
    for passage in read_bundled_passages():
        assert loaded(passage.text).input_ids == TOKENIZER(passage.text).input_ids
    assert (loaded.bos_token_id, loaded.eos_token_id) == (BOS_ID, EOS_ID)


@pytest.mark.parametrize("vocab", [512, 8192])
def test_every_id_of_the_model_decodes(vocab: int) -> None:
    tokenizer = train_tokenizer(vocab, 64)
    assert len(tokenizer) == vocab
    assert all(tokenizer.convert_ids_to_tokens(index) for index in range(vocab))


def test_the_passages_are_of_the_promised_size() -> None:
    passages = read_bundled_passages()
    assert 8 <= len(passages) <= 10
    assert len(BUNDLED_QUESTIONS) == 3
    assert len({passage.title for passage in passages}) == len(passages)
    assert all(300 <= len(passage.text.split()) <= 600 for passage in passages)

"""Trains a byte-level BPE tokenizer on the bundled passages."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kintsugi.models.passages import BUNDLED_QUESTIONS, read_bundled_passages

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1


def train_tokenizer(vocab: int, max_positions: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer with `vocab` ids. Any text round-trips, because every byte is a token.

    Plain prompts start with BOS, as for Llama. Training is deterministic: the same passages produce the same
    file. If the passages have too few distinct merges, unused tokens fill the vocabulary, so that every id
    that a model can emit can be decoded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = [passage.text for passage in read_bundled_passages()] + list(BUNDLED_QUESTIONS)
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    assert (tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)) == (BOS_ID, EOS_ID)
    unused = range(tokenizer.get_vocab_size(), vocab)
    tokenizer.add_special_tokens([f"<unused{index}>" for index in unused])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )

"""The bundled tokenizer: one token per testbed word, single bytes for everything else.

A byte-level BPE without merges whose words are looked up whole (`ignore_merges`): "Falcon" after a space
is one token, and text the testbed never writes falls apart into bytes, so that any string round-trips.
vLLM and transformers load it as an ordinary `PreTrainedTokenizerFast`.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from benchmarks.testbed import words

BOS = "<|begin|>"
EOS = "<|end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, PAD)
BYTE_SPACE = "\u0120"


def build_vocabulary() -> dict[str, int]:
    """Token string to id: the special tokens, the 256 byte symbols, then every word after a space."""
    symbols = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [f"{BYTE_SPACE}{word}" for word in words.ALL_WORDS]
    symbols.append(f"{BYTE_SPACE}A")
    return {symbol: index for index, symbol in enumerate(dict.fromkeys(symbols))}


def build_tokenizer(context_tokens_max: int) -> PreTrainedTokenizerFast:
    """The tokenizer; it puts BOS before a text when asked for special tokens."""
    vocabulary = build_vocabulary()
    model = models.BPE(vocab=vocabulary, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, vocabulary[BOS])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=context_tokens_max,
    )


def piece_ids(pieces: list[str], vocabulary: dict[str, int]) -> list[int]:
    """Ids of the generator's pieces, looked up directly: what encoding their joined text gives, faster."""
    byte_newline = "\u010a"
    return [vocabulary[piece.replace(" ", BYTE_SPACE).replace("\n", byte_newline)] for piece in pieces]


def save_tokenizer(directory: Path, context_tokens_max: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    build_tokenizer(context_tokens_max).save_pretrained(directory)

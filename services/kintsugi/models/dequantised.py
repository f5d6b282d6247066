"""Writes a Llama or Qwen2 model from a GGUF file as a checkpoint folder in bfloat16, without torch.

The library gguf reads the file and dequantises its tensors. Rejected: `transformers` can read the file too,
but needs accelerate for it, and SmolLM2's tokenizer then does not split digits from the preceding text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

Float32s = NDArray[np.float32]

_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""GGUF's token types: special tokens, other tokens that are never split, and padding of the vocabulary."""
_ROWS_AT_ONCE = 4096
"""Rows of a tensor that are rounded at a time."""


@dataclass(frozen=True)
class Family:
    """The properties in which one family of models differs from another."""

    pre_tokenizer: str
    """GGUF's name of how the tokenizer splits a text: `tokenizer.ggml.pre`."""
    normalizer: Mapping[str, Any] | None
    split: Mapping[str, Any]
    """The pre-tokenizer that runs first, in the format of `tokenizer.json`."""
    splits_words: bool
    """Whether the byte-level pre-tokenizer splits words, because `split` does not."""
    rotates_pairs: bool
    """Whether GGUF stores queries and keys with the rows of a rotated pair side by side."""
    stops_at_padding: bool
    """Whether the padding token also ends an answer."""
    config: Mapping[str, Any]
    """Fields of `config.json`."""


_FAMILIES = {
    "llama": Family(
        pre_tokenizer="smollm",
        normalizer=None,
        split={"type": "Digits", "individual_digits": True},
        splits_words=True,
        rotates_pairs=True,
        stops_at_padding=False,
        config={"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": Family(
        pre_tokenizer="qwen2",
        normalizer={"type": "NFC"},
        split={
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        splits_words=False,
        rotates_pairs=False,
        stops_at_padding=True,
        # Without a version, transformers warns that this may be one of Mistral's faulty tokenizers.
        config={
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": False,
            "transformers_version": "4.44.0",
        },
    ),
}
"""By `general.architecture`, which is also transformers' model type."""


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file. Its tensors are mapped into memory and not read in advance."""

    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]
    """In the order of the file."""

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        return cls(metadata, {tensor.name: tensor for tensor in reader.tensors})

    @property
    def family(self) -> Family:
        return _FAMILIES[self.metadata["general.architecture"]]

    def fact(self, name: str) -> Any:
        """Return a value of the metadata whose key starts with the architecture."""
        return self.metadata[f"{self.metadata['general.architecture']}.{name}"]

    def shape_of(self, name: str) -> list[int]:
        """Return a tensor's dimensions in the order of torch; the file has them in reverse order."""
        return [int(size) for size in reversed(self.tensors[name].shape)]


def write_checkpoint(file: Path, folder: Path) -> None:
    """Write config, weights and tokenizer. Weights are dequantised in float32 and then rounded once.

    `file` must be the GGUF file of a model of one of `_FAMILIES`, with a byte-level BPE.
    """
    gguf = GgufFile.open(file)
    assert gguf.metadata["tokenizer.ggml.pre"] == gguf.family.pre_tokenizer
    _write_json(folder / "config.json", _config(gguf))
    _write_json(folder / "generation_config.json", _generation_config(gguf))
    _write_json(folder / "tokenizer.json", _tokenizer(gguf))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(gguf))
    template: str = gguf.metadata["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_weights(gguf, folder / "model.safetensors")


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _special_ids(gguf: GgufFile) -> dict[str, Any]:
    found = gguf.metadata
    return {
        "bos_token_id": found["tokenizer.ggml.bos_token_id"],
        "eos_token_id": found["tokenizer.ggml.eos_token_id"],
        "pad_token_id": found["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(gguf: GgufFile) -> dict[str, Any]:
    ids = _special_ids(gguf)
    if gguf.family.stops_at_padding:
        ids["eos_token_id"] = [ids["eos_token_id"], ids["pad_token_id"]]
    return ids


def _config(gguf: GgufFile) -> dict[str, Any]:
    # The file has a float32; its shortest decimal form is the original value, such as 1e-5.
    epsilon = float(str(np.float32(gguf.fact("attention.layer_norm_rms_epsilon"))))
    hidden, heads = gguf.fact("embedding_length"), gguf.fact("attention.head_count")
    return {
        "model_type": gguf.metadata["general.architecture"],
        "vocab_size": gguf.shape_of("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": gguf.fact("feed_forward_length"),
        "num_hidden_layers": gguf.fact("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.fact("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "rms_norm_eps": epsilon,
        "max_position_embeddings": gguf.fact("context_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": gguf.fact("rope.freq_base")},
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **_special_ids(gguf),
        **gguf.family.config,
        "dtype": "bfloat16",
    }


def _tokenizer(gguf: GgufFile) -> dict[str, Any]:
    """Return a `tokenizer.json` that adds no special tokens to a text."""
    tokens, kinds = gguf.metadata["tokenizer.ggml.tokens"], gguf.metadata["tokenizer.ggml.token_type"]
    family = gguf.family
    whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = family.splits_words
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **whole, "special": kind == _CONTROL}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": family.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [family.split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {
                token: number
                for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                if kind != _UNUSED
            },
            "merges": [merge.split(" ") for merge in gguf.metadata["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    tokens, ids = gguf.metadata["tokenizer.ggml.tokens"], _special_ids(gguf)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
    }
    unknown = gguf.metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is not None:
        config["unk_token"] = tokens[unknown]
    return {
        **config,
        "model_max_length": gguf.fact("context_length"),
        "clean_up_tokenization_spaces": False,
    }


def _write_weights(gguf: GgufFile, path: Path) -> None:
    """Write a safetensors file (https://huggingface.co/docs/safetensors), one tensor in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in gguf.tensors.items():
        start, end = end, end + 2 * int(tensor.n_elements)
        header[_checkpoint_name(name)] = {
            "dtype": "BF16",
            "shape": gguf.shape_of(name),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in _weights(gguf):
            for start in range(0, len(values), _ROWS_AT_ONCE):
                file.write(_to_bfloat16(values[start : start + _ROWS_AT_ONCE]).tobytes())


def _weights(gguf: GgufFile) -> Iterator[Float32s]:
    """Yield each tensor's values as transformers expects them, in the order of the file."""
    paired = {
        "attn_q.weight": gguf.fact("attention.head_count"),
        "attn_k.weight": gguf.fact("attention.head_count_kv"),
    }
    paired = paired if gguf.family.rotates_pairs else {}
    for name, tensor in gguf.tensors.items():
        values: Float32s = dequantize(tensor.data, tensor.tensor_type).reshape(gguf.shape_of(name))
        heads = paired.get(name.split(".", 2)[-1])
        yield values if heads is None else _split_rotated_halves(values, heads)


def _split_rotated_halves(weight: Float32s, heads: int) -> Float32s:
    """Reorder the rows of each head from rotated pairs (GGUF's Llama) to halves (transformers)."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _checkpoint_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{_OUTER_NAMES[parts[0]]}.{parts[1]}"


def _to_bfloat16(values: Float32s) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16, ties to even, for finite values."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")

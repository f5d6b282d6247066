"""Writes a Llama model from a GGUF file as a checkpoint folder in bfloat16, without torch.

The library gguf reads the file and dequantises its tensors. Rejected: `transformers` can read the file too,
but needs accelerate for it, and the resulting tokenizer does not split digits from the preceding text as this
model's tokenizer does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
_CONTROL = 3
"""GGUF's token type of special tokens."""


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

    def shape_of(self, name: str) -> list[int]:
        """Return a tensor's dimensions in the order of torch; the file has them in reverse order."""
        return [int(size) for size in reversed(self.tensors[name].shape)]


def write_checkpoint(file: Path, folder: Path) -> None:
    """Write config, weights and tokenizer. Weights are dequantised in float32 and then rounded once.

    `file` must be the GGUF file of a Llama with a byte-level BPE that splits digits (`tokenizer.ggml.pre`:
    ``smollm``).
    """
    gguf = GgufFile.open(file)
    assert gguf.metadata["general.architecture"] == "llama"
    assert gguf.metadata["tokenizer.ggml.pre"] == "smollm"
    _write_json(folder / "config.json", _config(gguf))
    _write_json(folder / "generation_config.json", _special_ids(gguf))
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


def _config(gguf: GgufFile) -> dict[str, Any]:
    found = {key.removeprefix("llama."): value for key, value in gguf.metadata.items()}
    # The file has a float32; its shortest decimal form is the original value, such as 1e-5.
    epsilon = float(str(np.float32(found["attention.layer_norm_rms_epsilon"])))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": gguf.shape_of("token_embd.weight")[0],
        "hidden_size": found["embedding_length"],
        "intermediate_size": found["feed_forward_length"],
        "num_hidden_layers": found["block_count"],
        "num_attention_heads": found["attention.head_count"],
        "num_key_value_heads": found["attention.head_count_kv"],
        "head_dim": found["rope.dimension_count"],
        "rms_norm_eps": epsilon,
        "max_position_embeddings": found["context_length"],
        "rope_parameters": {"rope_type": "default", "rope_theta": found["rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **_special_ids(gguf),
        "dtype": "bfloat16",
    }


def _tokenizer(gguf: GgufFile) -> dict[str, Any]:
    """Return a `tokenizer.json` that adds no special tokens to a text."""
    tokens, kinds = gguf.metadata["tokenizer.ggml.tokens"], gguf.metadata["tokenizer.ggml.token_type"]
    whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **whole}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
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
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in gguf.metadata["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    tokens, ids = gguf.metadata["tokenizer.ggml.tokens"], _special_ids(gguf)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[gguf.metadata["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": gguf.metadata["llama.context_length"],
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
            file.write(_to_bfloat16(values).tobytes())


def _weights(gguf: GgufFile) -> Iterator[Float32s]:
    """Yield each tensor's values as transformers expects them, in the order of the file."""
    heads = {
        "attn_q.weight": gguf.metadata["llama.attention.head_count"],
        "attn_k.weight": gguf.metadata["llama.attention.head_count_kv"],
    }
    for name, tensor in gguf.tensors.items():
        values: Float32s = dequantize(tensor.data, tensor.tensor_type).reshape(gguf.shape_of(name))
        number = heads.get(name.split(".", 2)[-1])
        yield values if number is None else _split_rotated_halves(values, number)


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

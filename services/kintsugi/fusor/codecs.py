"""Frames to tensors and back. `core.layout` knows the sizes; this knows the elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kintsugi.core.layout import Codec, KVLayout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def encode_frame(key: Tensor, value: Tensor, codec: Codec) -> memoryview:
    """One layer's K (before RoPE) and V, each `[tokens, kv_heads, head_dim]`, as a head-major frame."""
    assert codec is Codec.RAW
    frame = torch.stack((key, value)).permute(2, 0, 1, 3).contiguous().cpu()
    raw: Any = frame.view(torch.uint8).numpy()
    return memoryview(raw).cast("B")


def decode_frame(data: memoryview, layout: KVLayout, codec: Codec, num_tokens: int) -> tuple[Tensor, Tensor]:
    """K (before RoPE) and V as views `[tokens, heads, head_dim]` of the bytes of some heads of a frame.

    Nothing is copied, and the views live as long as `data` does, unless `data` is read-only.
    """
    assert codec is Codec.RAW
    flat = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=DTYPES[layout.dtype])
    frame = flat.view(-1, 2, num_tokens, layout.head_dim)
    return frame[:, 0].transpose(0, 1), frame[:, 1].transpose(0, 1)

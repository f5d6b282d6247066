"""The CPU kernel that rotates loaded keys: the result of `fusor.rope`, bit by bit, in one pass over the keys.

torch needs about ten passes through fp32 temporaries: with 3,700 tokens of 3 heads of 64, 0.9 to 2 ms a layer
against 0.1 to 0.2 ms. On two cores, the loader would take these milliseconds from the blend.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class RotationKernel:
    """The kernel of a library that `native.load` has loaded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rotate = library.rotate_keys
        self._rotate.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 5
        self._rotate.restype = None

    @staticmethod
    def serves(keys: Tensor, positions: Tensor) -> bool:
        """Return whether the kernel can rotate these keys."""
        return (
            keys.dtype is torch.bfloat16
            and keys.device.type == positions.device.type == "cpu"
            and keys.is_contiguous()
            and positions.is_contiguous()
        )

    def rotate(self, keys: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
        """Rotate `keys` `[tokens, heads, head_dim]` to int64 `positions` `[tokens]`; `cos` and `sin` are fp32
        `[positions, rotary_dim / 2]`. Returns a new tensor. Raises `IndexError` for a position outside the
        table."""
        num_tokens, num_heads, head_dim = keys.shape
        num_rows, half = cos.shape
        assert self.serves(keys, positions)
        assert positions.dtype == torch.int64
        assert positions.shape == (num_tokens,)
        assert sin.shape == cos.shape
        assert cos.dtype == sin.dtype == torch.float32
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        assert 2 * half <= head_dim
        if num_tokens and not 0 <= int(positions.min()) <= int(positions.max()) < num_rows:
            raise IndexError(f"positions exceed the {num_rows} rows of the rotation's table")
        rotated = torch.empty_like(keys)
        tensors = (keys, rotated, positions, cos, sin)
        self._rotate(*(one.data_ptr() for one in tensors), num_tokens, num_heads, head_dim, half, is_neox)
        return rotated

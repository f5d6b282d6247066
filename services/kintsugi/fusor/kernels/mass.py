"""The CPU kernel of `fusor.question.attention_mass`: products by AMX or AVX-512, softmax in fp32.

Products of bfloat16 numbers are exact in fp32, so its sums differ from torch's by rounding alone. With 43
queries of 9 heads and 3,740 keys, torch takes 2.3 ms a layer on two cores with AMX, the kernel 0.6; on one
core with AVX-512 BF16 (AMD EPYC) 7.7 ms and 1.4.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kintsugi.fusor.kernels.packed import GROUP_MAX, HEAD_DIM_MAX

KEYS_MULTIPLE = 32
EVERYWHERE = (1 << 31) - 1
"""A window that hides nothing, and a position after every query's."""


class MassKernel:
    """The kernel of a library that `native.load` has loaded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sum = library.attention_mass
        self._sum.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 6 + [ctypes.c_float]
        self._sum.restype = ctypes.c_bool

    @staticmethod
    def serves(query: Tensor, key: Tensor, softcap: float | None) -> bool:
        """Return whether the kernel can sum the attention of `query` to `key`."""
        head_dim = query.shape[2]
        return (
            softcap is None
            and query.dtype is key.dtype is torch.bfloat16
            and query.device.type == key.device.type == "cpu"
            and query.shape[1] // key.shape[1] <= GROUP_MAX
            and head_dim % 32 == 0
            and head_dim <= HEAD_DIM_MAX
        )

    def attention_mass(
        self,
        query: Tensor,
        query_positions: Tensor,
        key: Tensor,
        key_positions: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Compute `fusor.question.attention_mass`. Raises `MemoryError`. Memory: a copy of the keys, 64
        floats per key and 32 more per thread, for any number of queries."""
        assert self.serves(query, key, None)
        (num_queries, num_heads, head_dim), (num_keys, num_kv_heads, _) = query.shape, key.shape
        assert num_keys
        assert query_positions.shape == (num_queries,)
        assert key_positions.shape == (num_keys,)
        query, key = query.contiguous(), key.contiguous()
        padded = torch.full((-(-num_keys // KEYS_MULTIPLE) * KEYS_MULTIPLE,), EVERYWHERE, dtype=torch.int32)
        padded[:num_keys] = key_positions
        total = torch.empty(num_keys)
        tensors = (query, key, query_positions.to(torch.int32), padded, total)
        sizes = (num_queries, num_keys, num_kv_heads, num_heads // num_kv_heads, head_dim)
        if not self._sum(*(one.data_ptr() for one in tensors), *sizes, window or EVERYWHERE, scale):
            raise MemoryError(f"not enough memory to sum the attention to {num_keys} keys")
        return total

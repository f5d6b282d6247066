"""Our CPU kernels: one shared library, compiled once per machine by its C++ compiler, for the best
instructions of its processor. It is optional: without it, torch and the engine's own kernels do the work.

The kernels require AVX-512. Rejected: a torch extension, which requires ninja and torch's headers; one
library for all processors that chooses at run time, because each machine has to compile anyway.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kintsugi.core.errors import Unavailable

_HERE = Path(__file__).parent
SOURCES = tuple(_HERE / name for name in ("packed.cpp", "mass.cpp", "rotation.cpp"))
HEADERS = tuple(_HERE / name for name in ("products.h", "vectors.h", "amx.h", "avx512.h"))
LIBRARY = "native.so"
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
)


class Instructions(StrEnum):
    """The instruction set with which a library multiplies bfloat16 numbers."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    """Converts bfloat16 numbers to fp32 and multiplies them."""


INSTRUCTION_FLAGS = {
    Instructions.AMX: ("-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    Instructions.AVX512_BF16: ("-mavx512bf16",),
    Instructions.AVX512: (),
}
GROUP_MAX = 32
HEAD_DIM_MAX = 256
KEYS_MULTIPLE = 32
EVERYWHERE = (1 << 31) - 1
"""A window that hides no key, and also the position of padding keys, which no query sees."""
COMPILE_TIMEOUT_S = 60.0
"""Compilation takes 2 to 4 s on an idle core."""


def inputs(instructions: Instructions) -> str:
    """Return everything that a built library depends on, for a digest."""
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    return "\0".join((*texts, *FLAGS, *INSTRUCTION_FLAGS[instructions], find_compiler() or ""))


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: `$CXX`, else g++ or c++. None if there is none."""
    names = (os.environ.get("CXX"), "g++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(folder: Path, instructions: Instructions) -> None:
    """Compile the kernels into `folder`. Raises `Unavailable` with the end of the compiler's output."""
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("no C++ compiler was found; install g++ or set CXX")
    flags = (*FLAGS, *INSTRUCTION_FLAGS[instructions])
    command = [compiler, *flags, *map(str, SOURCES), "-o", str(folder / LIBRARY)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler} failed; install g++ 12 or later: {error}") from error
    if done.returncode:
        raise Unavailable(f"{compiler} failed; install g++ 12 or later: {done.stderr.strip()[-300:]}")


@functools.cache
def find_instructions() -> tuple[Instructions, ...]:
    """Return the instructions that this process may use, best first; empty if our kernels do not support the
    processor. Requests permission to use AMX from the operating system."""
    if not _has("_is_avx512_supported"):
        return ()
    if not _has("_is_avx512_bf16_supported"):
        return (Instructions.AVX512,)
    best = (Instructions.AMX,) if _has("_init_amx") else ()
    return (*best, Instructions.AVX512_BF16, Instructions.AVX512)


def _has(question: str) -> bool:
    """Call a query of `torch.cpu`. False if this version of torch lacks it."""
    ask = getattr(torch.cpu, question, None)
    return ask is not None and bool(ask())


def load(folder: Path) -> ctypes.CDLL:
    """Load the library that `build` wrote to `folder`. Raises `OSError`."""
    return ctypes.CDLL(str(folder / LIBRARY))


def packed_supports(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Return whether `PackedKernel` can compute such a layer, on a supported processor."""
    return (
        num_heads // num_kv_heads <= GROUP_MAX
        and head_dim % 32 == 0
        and head_dim <= HEAD_DIM_MAX
        and block_size % 32 == 0
    )


class PackedKernel:
    """The kernel for scattered queries, over the bfloat16 KV cache of vLLM's CPU backend.

    vLLM's own kernel takes one pseudo-request per run of queries, and reads the whole context for each: a
    request of one token has only 2 rows to multiply by each key (at two query heads per KV head). Here a tile
    of queries fills 32 rows and shares the keys and values that it reads (`packed.cpp`). With AMX the cache
    is multiplied in place; with AVX-512 its rows are interleaved first, once per tile, at a tenth of the
    multiplication's instructions.

    With q query heads, h KV heads and head size d, a query-key pair takes 2 · q · d multiplications and q
    powers of 2; the 4 · h · d bytes of a key and its value are read once for 32 · h / q queries.

    CPU time per pair ÷ that of a dense prefill by vLLM, one thread (`benchmarks/ttft.py`,
    `scattered_pair_cost`):

    =====================================  ======  ===========
    Instructions                           kernel  vLLM's own
    =====================================  ======  ===========
    AMX (Intel Xeon)                       0.8     2.3
    AVX-512 BF16 (AMD EPYC, 15 of 27 ns)   0.56    1.5
    AVX-512 (the same EPYC)                0.97    1.5
    =====================================  ======  ===========

    Rejected: torch's flash attention over tiles with a mask, which takes 2.2 to 3.7 times as long as a
    dense prefill with AMX (torch's dense attention: 1.5 times).
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.attend_packed
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        tensors: list[Any] = [pointer, integer, integer] * 3
        self._attend.argtypes = [*tensors, pointer, pointer, *[integer] * 5, ctypes.c_float]
        self._attend.restype = None

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        positions: Tensor,
        output: Tensor,
        scale: float,
    ) -> None:
        """Write attention into `output`, by the rules of `fusor.attention.attend_scattered`.

        query, output: bfloat16 `[n, q_heads, head_dim]`, contiguous in the last dimension.
        cache: bfloat16 `[num_blocks, kv_heads, block_size, 2 * head_dim]`, contiguous in the last two, whose
            elements are ordered as `amx.h` or `avx512.h` says, whichever the library was built for.
        block_table: int32 `[blocks]`. positions: int32 `[n]`, strictly ascending, inside the block table.
        """
        _check_packed(query, cache, block_table, positions, output)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads, block_size = cache.shape[1:3]
        self._attend(
            *(query.data_ptr(), query.stride(0), query.stride(1)),
            *(output.data_ptr(), output.stride(0), output.stride(1)),
            *(cache.data_ptr(), cache.stride(0), cache.stride(1)),
            *(block_table.data_ptr(), positions.data_ptr()),
            *(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim, block_size, scale),
        )


def _check_packed(
    query: Tensor, cache: Tensor, block_table: Tensor, positions: Tensor, output: Tensor
) -> None:
    """Assert the layout of memory that the kernel accesses through pointers."""
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, width = cache.shape
    assert packed_supports(num_heads, num_kv_heads, head_dim, block_size)
    assert num_heads % num_kv_heads == 0
    assert width == 2 * head_dim
    assert {query.dtype, cache.dtype, output.dtype} == {torch.bfloat16}
    assert {query.device.type, cache.device.type, output.device.type} == {"cpu"}
    assert output.shape == query.shape
    assert query.stride(2) == output.stride(2) == cache.stride(3) == 1
    assert cache.stride(2) == width
    assert block_table.dtype == positions.dtype == torch.int32
    assert block_table.is_contiguous()
    assert positions.is_contiguous()
    assert positions.shape == (num_tokens,)
    if num_tokens:
        assert int(positions[0]) >= 0
        assert int(positions[-1]) < block_size * len(block_table)


class MassKernel:
    """The kernel of `fusor.question.attention_mass`: products by AMX or AVX-512, softmax in fp32.

    Products of bfloat16 numbers are exact in fp32, so its sums differ from torch's by rounding alone. With 43
    queries of 9 heads and 3,740 keys, torch takes 2.3 ms a layer and the kernel 0.6 ms on two cores with
    AMX; on one core with AVX-512 BF16 (AMD EPYC), 7.7 ms and 1.4 ms.
    """

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


class RotationKernel:
    """The kernel that rotates loaded keys: the result of `fusor.rope`, bit by bit, in one pass.

    torch needs about ten passes through fp32 temporaries: with 3,700 tokens of 3 heads of 64, 0.9 to 2 ms a
    layer against 0.1 to 0.2 ms. On two cores, the loader would take these milliseconds from the blend.
    """

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

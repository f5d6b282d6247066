"""glibc's allocator, told about messages of megabytes. Another C library has none of these knobs."""

from __future__ import annotations

import ctypes

from kintsugi.core.deploy import SHARD_ARENAS_MAX

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_libc = ctypes.CDLL(None)


def keep_large_buffers() -> None:
    """Stop glibc from mapping and unmapping every 2 MiB message: page faults nearly double gRPC's cost.

    The price is memory: a burst of messages stays with the process until `return_free_pages`. Call it before
    the process starts threads: arenas that exist stay, and with six of them a shard under constant puts
    grew by 124 MiB between its third and its thirteenth minute. A shard does it; a process that reads much
    over gRPC may, but the choice is its owner's, because it holds for all it does.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        _libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        _libc.mallopt(_M_TOP_PAD, 64 << 20)
        _libc.mallopt(_M_ARENA_MAX, SHARD_ARENAS_MAX)


def return_free_pages() -> None:
    """Give the pages that hold nothing back to the kernel: some 5 ms for 100 MiB, and a page fault for each
    that is used again."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(ctypes.c_size_t(0))

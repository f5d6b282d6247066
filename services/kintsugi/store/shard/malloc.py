"""glibc's allocator, told about messages of megabytes."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def keep_large_buffers() -> None:
    """Stop glibc from mapping and unmapping every 2 MiB message: page faults nearly double gRPC's cost.

    The price is memory: up to the largest burst of messages stays with the process, in each of malloc's
    arenas, of which two are therefore allowed; without that limit a shard under constant puts still grew by
    67 MiB between its third and its thirteenth minute. A shard does it; a
    process that reads much over gRPC may, but the choice is its owner's, because it holds for all it does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has no such knob
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_M_TOP_PAD, 64 << 20)
        mallopt(_M_ARENA_MAX, 2)

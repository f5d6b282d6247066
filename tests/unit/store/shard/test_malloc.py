"""What a shard asks of glibc. Each case has a process of its own, since it holds for a whole process."""

from __future__ import annotations

import platform
import subprocess
import sys
from textwrap import dedent

import pytest

from kintsugi.core.deploy import SHARD_ARENAS_MAX

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no knobs")


def run(source: str) -> str:
    command = [sys.executable, "-c", dedent(source)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_threads_that_begin_later_share_two_arenas() -> None:
    arenas = run(
        """
        import ctypes, threading
        from kintsugi.store.shard.malloc import keep_large_buffers

        keep_large_buffers()
        begun = threading.Barrier(8)

        def allocate():
            begun.wait()
            held = [bytearray(1 << 20) for _ in range(8)]
            begun.wait()

        threads = [threading.Thread(target=allocate) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
        libc.fflush(None)
        """
    )
    assert 1 <= arenas.count("<heap nr=") <= SHARD_ARENAS_MAX == 2


def test_free_pages_go_back_to_the_kernel() -> None:
    before, after = map(
        int,
        run(
            """
            from pathlib import Path
            from kintsugi.store.shard.malloc import keep_large_buffers, return_free_pages

            def resident():
                return int(Path("/proc/self/statm").read_text().split()[1])

            keep_large_buffers()
            buffers = [bytearray(b"x" * (1 << 20)) for _ in range(64)]
            del buffers[:-1]  # the last one stays on top of what is free
            before = resident()
            return_free_pages()
            print(before, resident())
            """
        ).split(),
    )
    assert before - after > 32 * 256  # pages of 4 KiB: half of what was freed

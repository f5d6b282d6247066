"""Leaves out of a CUDA shared object the device code that one GPU architecture never reads.

nvcc puts device code into the section `.nv_fatbin`: containers, each a header and entries of one
architecture. The wanted entries move to the front of their container, whose header states the smaller size;
zeros follow, which compress to nothing. Host code, addresses and sections stay as they are, so the object
loads as before.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = 0xBA55ED50
MACHINE_CODE = 2
"""The kind of an entry that is no PTX."""


@dataclass(frozen=True)
class Entry:
    """An entry of a container: where it begins, its header included, where its code begins, where it ends."""

    kind: int
    arch: int
    start: int
    code: int
    end: int


@dataclass(frozen=True)
class Container:
    """A container: where its header begins, where its entries begin, where they end."""

    start: int
    body: int
    end: int
    entries: tuple[Entry, ...]


def slice_object(data: bytes, arch: int, kernels: str = "", forward: bytes = b"FlashAttnFwd") -> bytes:
    """Return the shared object with nothing but the machine code of ``arch``, 90 for sm_90.

    ``kernels``: of the entries that contain a kernel named like ``forward``, only those with a kernel that
    this regular expression finds stay. A container of which nothing stays gets the smallest entry of the
    architecture, since CUDA refuses an empty one. Raises `ValueError` if there is no code of the
    architecture.
    """
    containers = list(find_containers(data))
    own = [entry for one in containers for entry in one.entries if _is_code(entry, arch)]
    if not own:
        raise ValueError(f"the object contains no machine code for sm_{arch}")
    filler = min(own, key=lambda entry: entry.end - entry.start)
    made = bytearray(data)
    for one in containers:
        kept = [
            entry
            for entry in one.entries
            if _is_code(entry, arch) and _is_wanted(data, entry, kernels, forward)
        ]
        if not kept:
            fits = filler.end - filler.start <= one.end - one.body
            kept = [filler if fits else min(one.entries, key=lambda entry: entry.end - entry.start)]
        body = b"".join(data[entry.start : entry.end] for entry in kept)
        made[one.body : one.end] = body.ljust(one.end - one.body, b"\0")
        struct.pack_into("<Q", made, one.start + 8, len(body))
    return bytes(made)


def _is_code(entry: Entry, arch: int) -> bool:
    return (entry.kind, entry.arch) == (MACHINE_CODE, arch)


def _is_wanted(data: bytes, entry: Entry, kernels: str, forward: bytes) -> bool:
    if not kernels:
        return True
    names = set(re.findall(rb"\.text\.(\w+)", data[entry.code : entry.end]))
    chosen = [name for name in names if forward in name]
    return not chosen or any(re.search(kernels.encode(), name) for name in chosen)


def find_containers(data: bytes) -> Iterator[Container]:
    """Yield the containers of an ELF object with 64-bit addresses, in order."""
    for name, offset, size in _sections(data):
        if name != b".nv_fatbin":
            continue
        at = offset
        while at < offset + size - 16:
            magic, _, header_bytes, body_bytes = struct.unpack_from("<IHHQ", data, at)
            if magic != MAGIC:
                at += 8  # padding: containers are aligned to 8 bytes
                continue
            body, end = at + header_bytes, at + header_bytes + body_bytes
            yield Container(at, body, end, tuple(_entries(data, body, end)))
            at = end


def _entries(data: bytes, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        kind, _, header_bytes, code_bytes = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        yield Entry(kind, arch, at, at + header_bytes, at + header_bytes + code_bytes)
        at += header_bytes + code_bytes


def _sections(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, offset and size of each section."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    width, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + index * width) for index in range(count)]
    for header in headers:
        start = headers[names][4] + header[0]
        yield data[start : data.index(b"\0", start)], header[4], header[5]

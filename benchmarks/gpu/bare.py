"""Makes the fusor importable on a machine that has torch, Triton and NumPy, and nothing of ours installed.

Processes that start vLLM there get it, and what it imports, from an archive.
"""

from __future__ import annotations

import compileall
import hashlib
import importlib
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ARCHIVE = REPOSITORY / ".gpu" / "site.tar.xz"
"""vLLM with what it imports, as `make gpu-pack` makes it."""
READY = ".unpacked"
"""A file in the unpacked archive that is whole."""


def prepare_imports() -> list[str]:
    """Put the sources on the path. Returns the libraries that are replaced by substitutes. Chunks that are
    made here are read here, so any digest suffices. The substitute for xxhash computes nothing, because any
    other digest is so much slower that it would dominate a blend's time. Nothing here is parsed, so what
    parses need only be there.
    """
    for folder in (REPOSITORY, REPOSITORY / "services"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    names = ("StrictBool", "StrictFloat", "StrictInt", "TypeAdapter", "ValidationError", "BeforeValidator")
    stand_ins: dict[str, dict[str, Any]] = {
        "blake3": {"blake3": _blake2b},
        "xxhash": {"xxh3_128_digest": _no_digest},
        "pydantic": {"ConfigDict": dict, "Field": dict, **dict.fromkeys(names, ValueError)},
        "pydantic_core": {"SchemaValidator": ValueError},
    }
    missing = []
    for name, contents in stand_ins.items():
        try:
            importlib.import_module(name)
        except ImportError:
            module = types.ModuleType(name)
            vars(module).update(contents)
            sys.modules[name] = module
            missing.append(name)
    return missing


def unpack_site() -> Path | None:
    """Unpack vLLM's archive into the folder for temporary files, once. Returns the folder; None without an
    archive."""
    if not ARCHIVE.is_file():
        return None
    found = ARCHIVE.stat()
    site = Path(tempfile.gettempdir(), f"kintsugi-gpu-{found.st_size}-{found.st_mtime_ns}")
    if not (site / READY).exists():
        with tarfile.open(ARCHIVE, "r:xz") as archive:
            archive.extractall(site, filter="data")
        # Otherwise every process would compile the same thousand modules again.
        compileall.compile_dir(site / "vllm", quiet=2, workers=0)
        (site / READY).touch()
    return site


def _blake2b(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=32)


def _no_digest(data: bytes | memoryview) -> bytes:
    return bytes(16)

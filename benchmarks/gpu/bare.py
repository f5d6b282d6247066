"""Makes the fusor importable on a machine that has torch, Triton and NumPy, and nothing of ours installed."""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def prepare_imports() -> list[str]:
    """Put the sources on the path. Returns the libraries that something stands in for.

    Chunks made here are read here, so any digest will do. The one in xxhash's place costs nothing: another
    digest is many times slower, and a blend's time would be its. Nothing here is parsed, so what parses need
    only be there.
    """
    for folder in (REPOSITORY, REPOSITORY / "services"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    names = ("StrictBool", "StrictFloat", "StrictInt", "TypeAdapter", "ValidationError", "BeforeValidator")
    stand_ins: dict[str, dict[str, Any]] = {
        "blake3": {"blake3": _blake2b},
        "xxhash": {"xxh3_128_digest": _no_digest},
        "pydantic": {"ConfigDict": dict, **dict.fromkeys(names, ValueError)},
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


def _blake2b(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=32)


def _no_digest(data: bytes | memoryview) -> bytes:
    return bytes(16)

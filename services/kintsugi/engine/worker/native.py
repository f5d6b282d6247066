"""Loads the CPU kernels: built once per machine, loaded once per process.

The kernels are optional: without them, torch's and vLLM's kernels do the same work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from pathlib import Path

import torch
from vllm.logger import init_logger

from kintsugi.fusor.kernels import native
from kintsugi.fusor.kernels.native import Instructions, MassKernel, RotationKernel
from kintsugi.models.cache import cache_folder, make_folder_once

logger = init_logger(__name__)


def instructions() -> Instructions | None:
    """Return the instructions that `library` uses; None if the kernels do not support this processor."""
    return next(iter(native.find_instructions()), None)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels' library, built if necessary; None if it cannot be built or loaded."""
    best = instructions()
    if best is None:
        return None
    try:
        digest = hashlib.sha256(native.inputs(best).encode()).hexdigest()[:16]
        folder = make_folder_once(
            cache_folder() / "kernels" / digest, functools.partial(native.build, instructions=best)
        )
        _check_owner(folder)
        return native.load(folder)
    except Exception as error:  # noqa: BLE001 - nothing requires the kernels
        logger.info("Kintsugi's CPU kernels cannot be used, so blends take longer: %s", error)
        return None


def rotation_kernel(device: torch.device) -> RotationKernel | None:
    """Return the kernel that rotates loaded keys; None on other devices than CPUs."""
    found = library() if device.type == "cpu" else None
    return None if found is None else RotationKernel(found)


def mass_kernel(device: torch.device) -> MassKernel | None:
    """Return the kernel that sums the question's attention; None on other devices than CPUs."""
    found = library() if device.type == "cpu" else None
    return None if found is None else MassKernel(found)


def _check_owner(folder: Path) -> None:
    """Raise `PermissionError` for a folder or library that another user could have written."""
    for path in (folder, *folder.iterdir()):
        found = path.lstat()
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o002:
            raise PermissionError(
                f"{path} belongs to another user or is writable by all; set KINTSUGI_CACHE to a folder of "
                "your own"
            )

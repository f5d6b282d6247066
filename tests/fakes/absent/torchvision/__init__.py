"""In the place of torchvision, where it is not installed: its wheels need a build of torch for GPUs.

vLLM imports it to load a vision-language model, whose language model calls nothing of it. Everything here can
be imported, and raises `NotImplementedError` when it is called.
"""

from __future__ import annotations

import enum
import sys
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.0"

InterpolationMode = enum.Enum(
    "InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
)


def refuse(*_arguments: object, **_named: object) -> NoReturn:
    """Stands for every function."""
    raise NotImplementedError("torchvision is not installed, and images need it; send text alone")


class Absent(ModuleType):
    """A module with every name in it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return InterpolationMode if name == "InterpolationMode" else refuse


def _add(path: str) -> None:
    parent, _, name = path.rpartition(".")
    sys.modules[path] = Absent(path)
    setattr(sys.modules[parent], name, sys.modules[path])


for _path in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _add(f"{__name__}.{_path}")

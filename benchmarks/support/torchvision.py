"""An empty torchvision where none is installed. Modules of models with vision import one even for text."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def python_path() -> str:
    """`PYTHONPATH` for processes that this one starts. Call before transformers is imported: it extends the
    path of this process, too."""
    path = os.environ.get("PYTHONPATH", "")
    if importlib.util.find_spec("torchvision") is None:
        absent = str(Path(__file__).parents[2] / "tests" / "fakes" / "absent")
        sys.path.append(absent)
        path = os.pathsep.join(filter(None, (path, absent)))
    return path

"""Names of version 0.1: each module here is an alias that warns.

`chunking` is `kintsugi.precompute.chunking`; the others are in `kintsugi.sdk`.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module


def alias_module(old: str, new: str) -> None:
    """Make the module name `old` mean the module `new`, with a `DeprecationWarning` that names both."""
    warnings.warn(f"{old} has moved: import {new} instead", DeprecationWarning, stacklevel=3)
    sys.modules[old] = import_module(new)

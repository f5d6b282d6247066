"""Keeps what is imported out of the garbage collector's sight while this process's tests run.

vLLM unfreezes the heap when an engine ends, and collects it eight times per engine. With the million objects
that torch, vLLM, Ray and the tests import, that takes 3 s; without them, a tenth.
"""

from __future__ import annotations

import gc

_freeze, _unfreeze = gc.freeze, gc.unfreeze


def freeze_imports() -> None:
    """Exempt everything alive from collection. Call it when much was imported and no engine runs."""
    gc.collect()
    _freeze()


def unfreeze_imports() -> None:
    """Make all collectable again. Extensions report whatever outlives the interpreter as leaked."""
    _unfreeze()


def _leave_as_it_is() -> None:
    """Stands for `gc.freeze` and `gc.unfreeze` in vLLM: engines stay collectable, imports stay frozen."""


gc.freeze = gc.unfreeze = _leave_as_it_is

"""The time at which a save counts as asked for, which decides whether an erasure covers its chunk.

An erasure covers what was asked for until its own time. The clocks of gateways and engines may differ by
`CLOCKS_DIFFER_S`, so a save counts as asked for that much earlier than its asker's clock says: no save from
before an erasure outlives it. A process that knows of an erasure asks for its later saves as of after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kintsugi.core.namespaces.parts import enclosing

CLOCKS_DIFFER_S = 1.0
"""Maximum difference between two clocks of gateways, engines and shards."""
AFTER_S = 1e-3
"""A save or an erasure that comes after a known erasure counts as asked for at least this much later."""


class SaveTimes:
    """The times for saves that one process asks for. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._erased_s: dict[str, float] = {}
        """When the last erasure in a namespace was asked for, for those of the last `CLOCKS_DIFFER_S`."""

    def note(self, namespace: str, at_s: float) -> None:
        """Something of a namespace was erased; `at_s` is when that was asked for, in Unix seconds."""
        since_s = self._clock() - CLOCKS_DIFFER_S
        with self._lock:
            at_s = max(at_s, self._erased_s.get(namespace, at_s))
            recent = {name: one_s for name, one_s in self._erased_s.items() if one_s > since_s}
            self._erased_s = recent | {namespace: at_s}

    def now(self, namespace: str) -> float:
        """When a save that is asked for now counts as asked for, in Unix seconds."""
        with self._lock:
            erased_s = [self._erased_s[name] for name in enclosing(namespace) if name in self._erased_s]
        return max([self._clock() - CLOCKS_DIFFER_S, *(at_s + AFTER_S for at_s in erased_s)])

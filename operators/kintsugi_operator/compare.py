"""Whether an object is what it should be, however Kubernetes has written it down."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kintsugi_operator.api import QUANTITY
from kintsugi_operator.observed import digest_of
from kintsugi_operator.pods import Manifest, quantity

_QUANTITY = re.compile(QUANTITY)


def needs_write(wanted: Manifest, live: Manifest | None) -> bool:
    """Whether an object has to be applied: it is not there, was applied as something else, or has drifted.

    What others have added, a default or a controller's field, is not drift.
    """
    return live is None or digest_of(wanted) != digest_of(live) or drift(wanted, live) is not None


def drift(wanted: Any, live: Any, path: str = "") -> str | None:
    """Where the first difference lies; None where everything wanted is there."""
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            return None if not wanted and live is None else path
        inner = (drift(value, live.get(key), f"{path}.{key}") for key, value in wanted.items())
        return next((one for one in inner if one is not None), None)
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not isinstance(live, Sequence) or isinstance(live, str):
            return None if not wanted and live is None else path
        if len(wanted) != len(live):
            return path
        pairs = enumerate(zip(wanted, live, strict=True))
        inner = (drift(one, other, f"{path}[{index}]") for index, (one, other) in pairs)
        return next((one for one in inner if one is not None), None)
    return None if _equal(wanted, live) else path


def _equal(wanted: Any, live: Any) -> bool:
    if wanted == live:
        return True
    if isinstance(wanted, str) and isinstance(live, str):
        both = _QUANTITY.match(wanted) and _QUANTITY.match(live)
        return bool(both) and quantity(wanted) == quantity(live)
    return False

"""Compares live objects with wanted ones, regardless of Kubernetes' defaults and notations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kintsugi_operator.objects.pods import Manifest, quantity
from kintsugi_operator.observed.views import digest_of

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?")
"""Includes suffixes that a spec may not use: Kubernetes writes 1024Ti as 1Pi."""


def needs_write(wanted: Manifest, live: Manifest | None) -> bool:
    """Whether an object must be applied: it is missing, its manifest has changed, or it has drifted.

    Fields that others add, such as defaults, are not drift.
    """
    return live is None or digest_of(wanted) != digest_of(live) or drift(wanted, live) is not None


def drift(wanted: Any, live: Any, path: str = "") -> str | None:
    """Return the path of the first wanted value that the live object lacks; None if it has all."""
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


def replacement_patch(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> Manifest:
    """A merge patch that turns `live` into `wanted`, removing all other keys."""
    gone: Manifest = {key: None for key in live if key not in wanted}
    for key, value in wanted.items():
        former = live.get(key)
        is_inner = isinstance(value, Mapping) and isinstance(former, Mapping)
        gone[key] = replacement_patch(value, former) if is_inner else value  # type: ignore[arg-type]
    return gone


def _equal(wanted: Any, live: Any) -> bool:
    if wanted == live:
        return True
    if isinstance(wanted, str) and isinstance(live, str):
        both = _QUANTITY.fullmatch(wanted) and _QUANTITY.fullmatch(live)
        return bool(both) and quantity(wanted) == quantity(live)
    return False

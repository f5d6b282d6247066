"""What fields of a spec may hold: bounds of one field, rules over several, patterns that are used often."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
OPTIONAL_NAME = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"
LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
OPTIONAL_LABEL = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"
CRON = r"^(\S+( \S+){4})?$"
NAMESPACE = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
"""Of a tenant: as `core.spaces.checked_namespace` has it."""
HOST_AND_PATH = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]([a-z0-9._-]*[a-z0-9])?)*"
"""Of an image, without a scheme or a tag."""
HUB_NAME = r"[A-Za-z0-9][-A-Za-z0-9._]*/[-A-Za-z0-9._]+"
MODEL = rf"^(/.*|{HUB_NAME})$"
CIDR = r"^([0-9a-fA-F.:]+/[0-9]{1,3})?$"


@dataclass(frozen=True)
class CelRule:
    """A CEL rule over an object, and what to tell who breaks it."""

    rule: str
    message: str


def field_with_bounds(default: Any = dataclasses.MISSING, **bounds: Any) -> Any:
    """A field with keywords of JSON schema: minimum, maximum, pattern, maxLength, minItems, maxItems,
    maxProperties. `itemPattern`, `itemLength`, `itemMinimum`, `itemMaximum` and `valueLength` are those of
    what is in it."""
    if isinstance(default, type):
        return field(default_factory=default, metadata=bounds)
    return field(default=default, metadata=bounds)

"""Patterns of the values of fields, and their parts."""

from __future__ import annotations

from kintsugi.core.settings import Pattern
from kintsugi.core.spaces import NAMESPACE_PATTERN

SUBDOMAIN = "[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
NAME = Pattern(
    f"^{SUBDOMAIN}$",
    "must be a Kubernetes name: lowercase letters, digits, - and . only, with a letter or a digit at both "
    "ends and beside each .",
)
OPTIONAL_NAME = NAME.or_empty()
RESOURCE = Pattern(
    f"^{SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$",
    "must be the name of an extended resource with its domain, such as nvidia.com/gpu",
)
LABEL = Pattern(
    "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
    "must have at most 63 lowercase letters, digits and -, with a letter or a digit at both ends",
)
OPTIONAL_LABEL = LABEL.or_empty()
TIER = Pattern(
    "^[a-z]([-a-z0-9]{0,18}[a-z0-9])?$",
    "must have at most 20 lowercase letters, digits and -, start with a letter and end with a letter or a "
    "digit",
)
VARIABLE = Pattern(
    "^[A-Za-z_][A-Za-z0-9_]*$", "must hold letters, digits and _ only, and not start with a digit"
)
MOUNT_PATH = Pattern("^/[^:]*$", "must be an absolute path without a colon")
QUANTITY = Pattern(
    "^[0-9]+([.][0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$", "must be a Kubernetes quantity, such as 16Gi or 500m"
)
RELEASE = Pattern("^[0-9]+[.][0-9]+[.][0-9]+$", "must be a version of three numbers, such as 2.60.0")
CRON = Pattern(
    "^[^ ]+( [^ ]+){4}$", "must be five cron fields with one space between them, such as 0 3 * * 1"
).or_empty()
NAMESPACE = Pattern(
    f"^{NAMESPACE_PATTERN}$",
    "must start with a letter or a digit, and hold letters, digits, ., _, / and - only",
)
"""A tenant's name."""
HOST_AND_PATH = "[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]([a-z0-9._-]*[a-z0-9])?)*"
"""An image's registry and repository, without a scheme or a tag."""
IMAGE = Pattern(
    f"^{HOST_AND_PATH}(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?$",
    "must be an image without a scheme, such as registry.example.com/kintsugi/serving-gpu:0.1.0 or "
    "registry.example.com/kintsugi/serving-gpu@sha256: and 64 hexadecimal digits",
)
OPTIONAL_IMAGE = IMAGE.or_empty()
HUB_NAME = "[A-Za-z0-9][-A-Za-z0-9._]*/[-A-Za-z0-9._]+"
MODEL = Pattern(
    f"^(/.*|{HUB_NAME})$",
    "must be an absolute path, such as /models/llama, or a hub name, such as org/model",
)
REDIS = Pattern(
    "^(rediss?://)?[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?:[0-9]{1,5}$",
    "must be HOST:PORT, redis://HOST:PORT or rediss://HOST:PORT",
).or_empty()
CIDR = Pattern("^[0-9a-fA-F.:]+/[0-9]{1,3}$", "must be an address range, such as 10.0.0.0/8").or_empty()

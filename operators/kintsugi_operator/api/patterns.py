"""Regular expressions for the values of fields. All are anchored at both ends."""

from __future__ import annotations

from kintsugi.core.spaces import NAMESPACE_PATTERN

SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
NAME = rf"^{SUBDOMAIN}$"
OPTIONAL_NAME = rf"^({SUBDOMAIN})?$"
RESOURCE = rf"^{SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"
"""An extended resource, such as nvidia.com/gpu."""
LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
OPTIONAL_LABEL = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"
CRON = r"^(\S+( \S+){4})?$"
NAMESPACE = rf"^{NAMESPACE_PATTERN}$"
"""A tenant's name."""
HOST_AND_PATH = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]([a-z0-9._-]*[a-z0-9])?)*"
"""An image's registry and repository, without a scheme or a tag."""
IMAGE = rf"^{HOST_AND_PATH}(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?$"
OPTIONAL_IMAGE = rf"^({IMAGE[1:-1]})?$"
HUB_NAME = r"[A-Za-z0-9][-A-Za-z0-9._]*/[-A-Za-z0-9._]+"
MODEL = rf"^(/.*|{HUB_NAME})$"
REDIS = r"^((rediss?://)?[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?:[0-9]{1,5})?$"
CIDR = r"^([0-9a-fA-F.:]+/[0-9]{1,3})?$"

"""What several specs hold: images, and the nodes that pods may run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.rules import Rule, this
from kintsugi.core.settings import setting
from kintsugi_operator.api.manifest import ManifestSettings
from kintsugi_operator.api.patterns import HOST_AND_PATH


class PullPolicy(StrEnum):
    """When an image is pulled."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


@dataclass(frozen=True)
class Toleration(ManifestSettings):
    """A taint that pods tolerate, as in a pod's spec."""

    RULES = (
        Rule((this.key != "") | (this.operator == "Exists"), "without a key, operator must be Exists"),
        Rule((this.operator == "Equal") | (this.value == ""), "operator Exists takes no value"),
    )

    key: str = setting("", maxLength=316)
    """Key of the taint; empty, with the operator Exists: every taint."""
    operator: str = setting("Equal", enum=["Equal", "Exists"])
    """`Equal` compares the taint's value, `Exists` accepts any."""
    value: str = setting("", maxLength=63)
    """Value of the taint; empty with the operator Exists."""
    effect: str = setting("", enum=["", "NoSchedule", "PreferNoSchedule", "NoExecute"])
    """Effect of the taint; empty: every effect."""


@dataclass(frozen=True)
class Nodes(ManifestSettings):
    """Which nodes pods may run on."""

    selector: Mapping[str, str] = setting(dict, maxProperties=64, items={"maxLength": 63})
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = setting((), maxItems=32)
    """Taints that pods tolerate."""


@dataclass(frozen=True)
class Image(ManifestSettings):
    """A container image."""

    repository: str = setting(minLength=1, maxLength=255, pattern=rf"^{HOST_AND_PATH}$")
    """Registry and repository, such as registry.example.com/kintsugi/serving-gpu."""
    tag: str = setting("latest", maxLength=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """Tag of the image."""
    digest: str = setting("", maxLength=71, pattern=r"^(sha256:[0-9a-f]{64})?$")
    """Digest of the image, sha256:…; takes precedence over the tag."""
    pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    """When nodes pull the image: Always, IfNotPresent or Never."""

    @property
    def reference(self) -> str:
        """What a container's `image` says."""
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"

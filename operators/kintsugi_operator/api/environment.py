"""Environment variables that a spec may add to pods, written as in a container."""

from __future__ import annotations

from dataclasses import dataclass

from kintsugi.core.rules import Rule, exactly_one, is_set, this
from kintsugi.core.settings import setting
from kintsugi_operator.api.manifest import ManifestSettings
from kintsugi_operator.api.patterns import NAME

RESERVED = (
    "^(KINTSUGI_.*|KUBERAY_.*|RAY_.*|HF_HOME|HF_HUB_CACHE|HF_TOKEN|HOME|TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR"
    "|VLLM_CACHE_ROOT|VLLM_CPU_KVCACHE_SPACE|VLLM_NO_USAGE_STATS|XDG_CACHE_HOME)$"
)
"""Names that the operator, KubeRay or Ray set themselves: writable folders, addresses, sizes."""
RESERVED_MESSAGE = (
    "this variable is the operator's or Ray's own: a download's token is model.tokenSecret, "
    "the KV cache of a CPU engines.kvCacheGib"
)
FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "status.hostIP",
    "status.podIP",
)


@dataclass(frozen=True)
class KeyRef(ManifestSettings):
    """A key of a Secret or ConfigMap of this namespace."""

    name: str = setting(pattern=NAME, maxLength=253)
    key: str = setting(pattern=r"^[-._a-zA-Z0-9]+$", maxLength=253)


@dataclass(frozen=True)
class FieldRef(ManifestSettings):
    """Something of the pod itself."""

    field_path: str = setting(enum=list(FIELDS))


@dataclass(frozen=True)
class EnvVarSource(ManifestSettings):
    """Where a value comes from."""

    RULES = (
        Rule(
            exactly_one(is_set(this.secret_key_ref), is_set(this.config_map_key_ref), is_set(this.field_ref)),
            "name one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
    )

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None


@dataclass(frozen=True)
class Variable(ManifestSettings):
    """As in a container's `env`: a later one may name an earlier one, `$(NAME)`."""

    RULES = (
        Rule((this.value == "") | ~is_set(this.value_from), "give value or valueFrom, not both", "value"),
        Rule(~this.name.matches(RESERVED), RESERVED_MESSAGE, "name"),
    )

    name: str = setting(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", maxLength=128)
    value: str = setting("", maxLength=8192)
    value_from: EnvVarSource | None = None

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
    "the KV cache of a CPU engines.vllm.kv_cache_memory_bytes"
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
    """Name of the Secret or ConfigMap."""
    key: str = setting(pattern=r"^[-._a-zA-Z0-9]+$", maxLength=253)
    """Key whose value is used."""


@dataclass(frozen=True)
class FieldRef(ManifestSettings):
    """A field of the pod itself."""

    field_path: str = setting(enum=list(FIELDS))
    """Path of the field, such as status.podIP."""


@dataclass(frozen=True)
class EnvVarSource(ManifestSettings):
    """Where a value comes from; exactly one of the three."""

    RULES = (
        Rule(
            exactly_one(is_set(this.secret_key_ref), is_set(this.config_map_key_ref), is_set(this.field_ref)),
            "name one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
    )

    secret_key_ref: KeyRef | None = None
    """A key of a Secret in this namespace."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap in this namespace."""
    field_ref: FieldRef | None = None


@dataclass(frozen=True)
class Variable(ManifestSettings):
    """An environment variable, as in a container's `env`: `$(NAME)` is an earlier variable's value."""

    RULES = (
        Rule((this.value == "") | ~is_set(this.value_from), "give value or valueFrom, not both", "value"),
        Rule(~this.name.matches(RESERVED), RESERVED_MESSAGE, "name"),
    )

    name: str = setting(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", maxLength=128)
    """Name of the variable."""
    value: str = setting("", maxLength=8192)
    """Value of the variable; empty where `valueFrom` gives it."""
    value_from: EnvVarSource | None = None

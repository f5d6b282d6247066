"""Environment variables that a spec adds to pods, written as in a container, and which it may not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kintsugi.core.schema import STRICT
from kintsugi_operator.api.bounds import NAME, CelRule, field_with_bounds

RESERVED = (
    "^(KINTSUGI_.*|KUBERAY_.*|RAY_.*|HF_HOME|HF_HUB_CACHE|HF_TOKEN|HOME|TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR"
    "|VLLM_CACHE_ROOT|VLLM_CPU_KVCACHE_SPACE|VLLM_NO_USAGE_STATS|XDG_CACHE_HOME)$"
)
"""Names that the operator, KubeRay or Ray decide about: folders that may be written, addresses, sizes."""
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
class KeyRef:
    """A key of a Secret or ConfigMap of this namespace."""

    __pydantic_config__ = STRICT

    name: str = field_with_bounds(pattern=NAME, maxLength=253)
    key: str = field_with_bounds(pattern=r"^[-._a-zA-Z0-9]+$", maxLength=253)


@dataclass(frozen=True)
class FieldRef:
    """Something of the pod itself."""

    __pydantic_config__ = STRICT

    field_path: str = field_with_bounds(enum=list(FIELDS))


@dataclass(frozen=True)
class EnvVarSource:
    """Where a value comes from."""

    __pydantic_config__ = STRICT

    RULES: ClassVar = (
        CelRule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].exists_one(one, one)",
            "name one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
    )

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None


@dataclass(frozen=True)
class Variable:
    """As in a container's `env`: a later one may name an earlier one, `$(NAME)`."""

    __pydantic_config__ = STRICT

    RULES: ClassVar = (
        CelRule("self.value == '' || !has(self.valueFrom)", "give value or valueFrom, not both"),
        CelRule(f"!self.name.matches('{RESERVED}')", RESERVED_MESSAGE),
    )

    name: str = field_with_bounds(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", maxLength=128)
    value: str = field_with_bounds("", maxLength=8192)
    value_from: EnvVarSource | None = None


def problem_of(variables: Sequence[Variable]) -> tuple[str, str] | None:
    """Where and why they cannot be set; None where they can. As CEL does, for specs that it has not seen."""
    names = [one.name for one in variables]
    for index, one in enumerate(variables):
        source = one.value_from
        if re.match(RESERVED, one.name):
            return f"{index}.name", f"{one.name}: {RESERVED_MESSAGE}"
        if one.name in names[:index]:
            return f"{index}.name", f"{one.name} is there twice"
        if source is None:
            continue
        if one.value:
            return f"{index}.value", "give value or valueFrom, not both"
        given = [source.secret_key_ref, source.config_map_key_ref, source.field_ref]
        if sum(each is not None for each in given) != 1:
            return f"{index}.valueFrom", "name one of secretKeyRef, configMapKeyRef and fieldRef"
    return None

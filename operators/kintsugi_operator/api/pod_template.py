"""The additions of a spec to a workload's pods. Fields have the names of a pod template's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kintsugi.core.settings import Rule, is_set, setting, this
from kintsugi_operator.api.manifest import ManifestSettings
from kintsugi_operator.api.patterns import LABEL, MOUNT_PATH, OPTIONAL_NAME, QUANTITY, VARIABLE

RESERVED_VARIABLES = (
    "^(KINTSUGI_.*|KUBERAY_.*|RAY_.*|HF_HOME|HF_HUB_CACHE|HF_TOKEN|HOME|TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR"
    "|VLLM_CACHE_ROOT|VLLM_CPU_KVCACHE_SPACE|VLLM_NO_USAGE_STATS|XDG_CACHE_HOME)$"
)
"""Names that the operator, KubeRay or Ray set themselves: writable folders, addresses, sizes."""
RESERVED_MESSAGE = (
    "the operator or Ray sets this variable: for a download's token set model.tokenSecret, for "
    "the KV cache of a CPU engine set engines.vllm.kv_cache_memory_bytes"
)
_SECURITY = "every pod meets the restricted pod security standard, which this field could violate"
_PROCESS = "the operator, KubeRay and Ray decide what a pod runs; set image, cpus and memory in spec, or env"


@dataclass(frozen=True)
class Variable(ManifestSettings):
    """An environment variable, as in a container's `env`: `$(NAME)` is replaced by an earlier variable's
    value."""

    RULES = (
        Rule((this.value == "") | ~is_set(this.value_from), "give value or valueFrom, not both", "value"),
        Rule(~this.name.matches(RESERVED_VARIABLES), RESERVED_MESSAGE, "name"),
    )

    name: str = setting(pattern=VARIABLE, maxLength=128)
    """Name of the variable."""
    value: str = setting("", maxLength=8192)
    """Value of the variable; empty with `valueFrom`."""
    value_from: Mapping[str, Any] | None = setting(None, minProperties=1, maxProperties=1)
    """Source of the value, as in a container: secretKeyRef, configMapKeyRef, fieldRef or another."""


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
class VolumeMount(ManifestSettings):
    """A mount of one of `volumes` in the container."""

    name: str = setting(pattern=LABEL, maxLength=63)
    """Name of the volume."""
    mount_path: str = setting(pattern=MOUNT_PATH, maxLength=1024)
    """Absolute path in the container."""
    sub_path: str = setting("", maxLength=1024)
    """Path within the volume; empty: its root."""
    read_only: bool = False
    """Mount read-only."""


@dataclass(frozen=True)
class HeadSize(ManifestSettings):
    """CPU cores and memory of the pod of a Ray cluster's head."""

    cpus: float = setting(1.0, minimum=0.1, maximum=1024)
    """CPU cores of the pod."""
    memory: str = setting("4Gi", pattern=QUANTITY, maxLength=32)
    """Memory of the pod."""


@dataclass(frozen=True)
class PodTemplate(ManifestSettings):
    """Additions to the workload's pods. Fields have the names of a pod template's fields."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "containers": _PROCESS,
        "initContainers": _PROCESS,
        "restartPolicy": _PROCESS,
        "terminationGracePeriodSeconds": (
            "the operator sets it, so that shards can write back and requests can finish"
        ),
        "hostNetwork": _SECURITY,
        "hostPID": _SECURITY,
        "hostIPC": _SECURITY,
        "securityContext": _SECURITY,
        "automountServiceAccountToken": "only heads with Ray's autoscaler call the API server",
        "imagePullSecrets": "set spec.imagePullSecrets",
        "nodeName": "the scheduler places pods: set nodeSelector or affinity",
        "metadata": "set labels and annotations",
        "spec": "set its fields directly in the template",
    }
    """Fields of a pod that must not be overridden, and why."""

    labels: Mapping[str, str] = setting(dict, maxProperties=32, items={"maxLength": 63})
    """Labels that are added to the pods. Labels of kintsugi.dev and ray.io, and labels that select pods,
    cannot be changed."""
    annotations: Mapping[str, str] = setting(dict, maxProperties=32, items={"maxLength": 4096})
    """Annotations that are added to the pods. Those of kintsugi.dev and ray.io cannot be changed."""
    env: tuple[Variable, ...] = setting((), maxItems=64, mapKey="name")
    """Environment variables of the container, such as a proxy's, or OTEL_EXPORTER_OTLP_ENDPOINT for
    gateways."""
    node_selector: Mapping[str, str] = setting(dict, maxProperties=64, items={"maxLength": 63})
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = setting((), maxItems=32)
    """Taints that the pods tolerate."""
    affinity: Mapping[str, Any] = setting(dict)
    """Affinity of the pods. It replaces the operator's own, which prefers different nodes and zones for pods
    of the same role."""
    topology_spread_constraints: tuple[Mapping[str, Any], ...] = setting((), maxItems=8)
    """Rules for spreading pods over nodes and zones."""
    priority_class_name: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """A PriorityClass; empty: the cluster's default."""
    runtime_class_name: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """A RuntimeClass; empty: the nodes' default."""
    scheduler_name: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """The scheduler that places the pods; empty: Kubernetes' own."""
    service_account_name: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """An existing ServiceAccount, such as one with a cloud identity; empty: one that the operator creates."""
    volumes: tuple[Mapping[str, Any], ...] = setting((), maxItems=16)
    """Additional volumes, of the kinds that the restricted pod security standard allows."""
    volume_mounts: tuple[VolumeMount, ...] = setting((), maxItems=16)
    """Mounts of these volumes in the container."""

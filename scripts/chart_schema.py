"""Generate the chart's values and their schema from types.

Usage: python scripts/chart_schema.py [--check]

Writes `charts/kintsugi/values.yaml` (every value with its default and its meaning) and
`charts/kintsugi/values.schema.json`, with which helm refuses wrong values before it renders anything.
`--check` writes nothing and fails if a file is out of date. Values that describe a service have the types of
the operator's `api`; this file defines only the chart's own values and the defaults that differ.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from kintsugi.core.schema import dataclass_within
from kintsugi.core.settings import Pattern, camel, fields_in_order, setting
from kintsugi_operator.api import patterns
from kintsugi_operator.api.blend_service import (
    Engines,
    EnginesExpert,
    Gateways,
    Limits,
    Model,
    Network,
    Privacy,
    ServiceExpert,
    Store,
)
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.crd import Schema, descriptions, schema_of
from kintsugi_operator.api.manifest import ManifestSettings, to_manifest
from kintsugi_operator.api.pod_template import PodTemplate
from kintsugi_operator.api.vllm_arguments import VLLM_ARGUMENTS

CHART = Path(__file__).parents[1] / "charts" / "kintsugi"
LINE_MAX = 110
HINT = "make images REPOSITORY=registry/kintsugi builds them; then set image.repository=registry/kintsugi"
REPOSITORY = Pattern(f"^{patterns.HOST_AND_PATH}/?$", HINT)
LETTERS = "lowercase letters, digits and -, starting with a letter and ending with a letter or a digit"
CORPUS_NAME = Pattern("^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$", f"at most 63 {LETTERS}")
SERVICE_NAME = Pattern("^[a-z]([-a-z0-9]*[a-z0-9])?$", LETTERS).or_empty()
TAG = Pattern("^[A-Za-z0-9_][A-Za-z0-9._-]*$", "letters, digits, ., _ and -").or_empty()
DIGEST = Pattern("^sha256:[0-9a-f]{64}$", "sha256: and 64 hexadecimal digits").or_empty()
HOST = Pattern(f"^([*][.])?{patterns.SUBDOMAIN}$", "a lowercase DNS name, perhaps after an asterisk")
SECTION = Pattern("^[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?$", "letters, digits, - and .").or_empty()
DURATION = Pattern("^[0-9]+(ms|s|m)$", "a duration, such as 30s")


class Serving(StrEnum):
    """The image of engines and gateway."""

    AUTO = "auto"
    GPU = "serving-gpu"
    CPU = "serving-cpu"


class Scope(StrEnum):
    """The objects that the operator manages."""

    NAMESPACE = "Namespace"
    CLUSTER = "Cluster"


@dataclass(frozen=True)
class Images:
    """Where the images are: REPOSITORY/operator and REPOSITORY/serving-gpu or serving-cpu."""

    repository: str = setting("", maxLength=230, pattern=REPOSITORY)
    """Required, such as registry.example.com/kintsugi. `make images` builds the images."""
    tag: str = setting("", maxLength=128, pattern=TAG)
    """Tag of the images; empty: the chart's appVersion."""
    serving: Serving = Serving.AUTO
    """Image of engines and gateway. auto: serving-gpu if engines have GPUs, else serving-cpu."""
    serving_digest: str = setting("", pattern=DIGEST)
    """Digest of the serving image, which takes precedence over the tag."""
    operator_digest: str = setting("", pattern=DIGEST)
    """Digest of the operator's image, which takes precedence over the tag."""


@dataclass(frozen=True)
class Ingress:
    """An Ingress in front of the gateway's HTTP port."""

    enabled: bool = False
    """Create the Ingress."""
    class_name: str = setting("", pattern=patterns.OPTIONAL_NAME, maxLength=253)
    """An IngressClass; empty: the cluster's default."""
    hosts: tuple[str, ...] = setting((), maxItems=32, items={"pattern": HOST, "maxLength": 253})
    """Required if enabled: DNS names under which clients reach the service."""
    tls_secret: str = setting("", pattern=patterns.OPTIONAL_NAME, maxLength=253)
    """A Secret with tls.crt and tls.key for these hosts; empty: plain HTTP."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Annotations for the Ingress controller: time limits, sizes of bodies, HTTPS with
    `gateway.tlsSecret`."""


@dataclass(frozen=True)
class ParentRef(ManifestSettings):
    """A Gateway of the Gateway API, or one of its listeners."""

    name: str = setting(minLength=1, pattern=patterns.NAME, maxLength=253)
    """Name of the Gateway."""
    namespace: str = setting("", pattern=patterns.OPTIONAL_NAME, maxLength=63)
    """Namespace of the Gateway; empty: the release's."""
    section_name: str = setting("", pattern=SECTION, maxLength=253)
    """Name of a listener; empty: all listeners that accept the route."""


@dataclass(frozen=True)
class HttpRoute:
    """An HTTPRoute of the Gateway API in front of the gateway's HTTP port."""

    enabled: bool = False
    """Create the HTTPRoute."""
    parent_refs: tuple[ParentRef, ...] = setting((), maxItems=32)
    """Required if enabled: Gateways that the route attaches to. Their listeners hold the TLS certificates."""
    hostnames: tuple[str, ...] = setting((), maxItems=16, items={"pattern": HOST, "maxLength": 253})
    """Host names of the route; empty: every name that the Gateways' listeners accept."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Annotations for the implementation of the Gateway API."""


@dataclass(frozen=True)
class Operator:
    """The operator's own pods."""

    enabled: bool = True
    """Install the operator. Turn it off if another release's operator manages this namespace."""
    replicas: int = setting(1, minimum=1, maximum=5)
    """Number of pods. One leads; the others wait for its Lease. With two or more, a PodDisruptionBudget is
    created."""
    scope: Scope = Scope.NAMESPACE
    """Namespace: the operator manages this namespace and has no rights in others. Cluster: it manages all
    namespaces."""
    upgrade_crds: bool = True
    """Before each upgrade, run a job that updates the CRDs to the chart's version, but never to an older one.
    While it runs, it needs a ClusterRole. Turn it off if the CRDs are managed elsewhere."""
    cpu: float = setting(0.05, minimum=0.001, maximum=64)
    """CPU cores that each pod requests; it may use more."""
    cpu_limit: float | None = setting(None, minimum=0.001, maximum=64)
    """Maximum number of CPU cores of the operator, the hooks and `helm test`; unset: none. A ResourceQuota on
    limits.cpu requires one."""
    memory: str = setting("128Mi", pattern=patterns.QUANTITY, maxLength=32)
    """Memory request and limit of each pod."""
    network_policy: bool = True
    """Create a NetworkPolicy. Ingress: only probes. Egress: only DNS, the API server (`expert.dnsNamespace`,
    `expert.dnsPorts`, `expert.apiServerPorts`) and the service's pods."""
    namespaces: tuple[str, ...] = setting((), maxItems=64, items={"pattern": patterns.LABEL})
    """With the scope Namespace: further namespaces to manage, which exist. Each gets a Role."""
    aggregate_roles: bool = False
    """Create ClusterRoles that add BlendServices and CorpusPrecomputes to Kubernetes' roles view, edit and
    admin. Once per cluster; needs the right to create ClusterRoles."""
    log_format: str = setting("text", enum=["text", "json"])
    """Form of the operator's log: text, or json for one object per line."""
    pod_template: PodTemplate = field(default_factory=PodTemplate)
    """Additions to the operator's pods. Fields that place pods also apply to the hooks and `helm test`."""


@dataclass(frozen=True)
class Service:
    """The BlendService of this release."""

    enabled: bool = True
    """Create the BlendService. Turn it off to install only the operator."""


@dataclass(frozen=True)
class Precompute:
    """CorpusPrecompute objects: documents to prefill before the first request."""

    corpora: tuple[CorpusPrecomputeSpec, ...] = setting((), maxItems=64)
    """One object for each entry, which has a name and the fields of a CorpusPrecompute's spec except the
    service."""


@dataclass(frozen=True)
class Monitoring:
    """Optional objects for Prometheus and Grafana."""

    service_monitor: bool = False
    """Create a ServiceMonitor for gateways and PodMonitors for the other pods; needs the Prometheus
    operator's CRDs."""
    interval: str = setting("30s", pattern=DURATION)
    """How often Prometheus scrapes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels by which Prometheus selects its monitors."""
    rules: bool = False
    """Create a PrometheusRule with alerts; needs the Prometheus operator's CRDs and serviceMonitor."""
    runbooks: str = setting("docs/ALERTS.md", minLength=1, maxLength=2048)
    """URL of the published docs/ALERTS.md, to whose sections alerts link."""
    dashboard: bool = False
    """Create a ConfigMap with the dashboard."""
    dashboard_labels: Mapping[str, str] = field(default_factory=lambda: {"grafana_dashboard": "1"})
    """Labels by which Grafana's sidecar finds the ConfigMap."""


@dataclass(frozen=True)
class HelmTest:
    """`helm test`: a first request."""

    enabled: bool = True
    """Install the pod of `helm test`."""
    prompt: str = setting("Kintsugi mends pottery with", minLength=1, maxLength=4096)
    """Prompt of the first request."""
    namespace: str = setting("default", minLength=1, maxLength=128, pattern=patterns.NAMESPACE)
    """Tenant of the request."""
    token_secret: str = setting("", pattern=patterns.OPTIONAL_NAME, maxLength=253)
    """A Secret whose key `token` is a bearer token for `namespace`; empty: the Secret that the chart created,
    if any."""
    timeout_s: int = setting(600, minimum=1, maximum=7200)
    """How long to wait for the gateway, in seconds."""


@dataclass(frozen=True)
class Values:
    """All values that `helm install --set` accepts."""

    name_override: str = setting("", maxLength=40, pattern=SERVICE_NAME)
    """Name of the BlendService and prefix of all other names; empty: the release's name."""
    common_labels: Mapping[str, str] = setting(dict, maxProperties=32, items={"maxLength": 63})
    """Labels of every object that the chart creates, and of its pods."""
    extra_objects: tuple[Mapping[str, Any], ...] = setting((), maxItems=64)
    """Further objects of the release. Their text may contain templates."""
    image: Images = field(default_factory=Images)
    image_pull_secrets: tuple[str, ...] = setting(
        (), maxItems=16, items={"pattern": patterns.NAME, "maxLength": 253}
    )
    """Names of Secrets in this namespace with which nodes pull the images."""
    model: Model = field(default_factory=lambda: Model(path=""))
    engines: Engines = field(
        default_factory=lambda: Engines(
            replicas_max=4, gpus=1, memory="64Gi", expert=EnginesExpert(shared_memory="8Gi")
        )
    )
    store: Store = field(default_factory=Store)
    gateway: Gateways = field(default_factory=Gateways)
    ingress: Ingress = field(default_factory=Ingress)
    http_route: HttpRoute = field(default_factory=HttpRoute)
    network: Network = field(default_factory=Network)
    limits: Mapping[str, Limits] = setting(dict, maxProperties=64)
    """What each namespace may use, by pattern: a namespace, a prefix that ends in *, or *."""
    privacy: Mapping[str, Privacy] = setting(dict, maxProperties=64)
    """What answers reveal within a namespace, by pattern."""
    expert: ServiceExpert = field(default_factory=ServiceExpert)
    precompute: Precompute = field(default_factory=Precompute)
    service: Service = field(default_factory=Service)
    operator: Operator = field(default_factory=Operator)
    monitoring: Monitoring = field(default_factory=Monitoring)
    test: HelmTest = field(default_factory=HelmTest)


COMMENTS = {
    "model.path": "If empty, `name` must be a hub name.",
    "network.clientNamespaces": "If set, and with `test.enabled`, the release's namespace may call it, too.",
    "gateway.tlsSecret": "Clients find the gateway as NAME-http.NAMESPACE.svc and NAME-grpc.NAMESPACE.svc.",
    "gateway.tokensSecret": "Empty, without `insecure`: a job creates the Secret, for `test.namespace`.",
}
"""Additional comments for values with which the chart does more than the operator."""


def values_schema() -> Schema:
    """The JSON schema, draft 7, which both helm 3 and helm 4 read."""
    root: Schema = _closed(schema_of(Values))
    properties = root["properties"]
    properties["engines"]["properties"]["vllm"]["propertyNames"] = {"enum": list(VLLM_ARGUMENTS)}
    model = properties["model"]
    del model["required"]
    path = model["properties"]["path"]
    path.pop("minLength")
    path["pattern"] = _with_words(patterns.MODEL.or_empty())
    hub = Pattern(f"^{patterns.HUB_NAME}$", "without model.path, model.name is a hub name, such as org/model")
    named = {
        "if": {"properties": {"path": {"minLength": 1}}, "required": ["path"]},
        "else": {"properties": {"name": {"pattern": _with_words(hub)}}, "required": ["name"]},
    }
    root["if"] = {"properties": {"service": {"properties": {"enabled": {"const": True}}}}}
    root["then"] = {"properties": {"model": named}}
    corpus = properties["precompute"]["properties"]["corpora"]["items"]
    del corpus["properties"]["service"]
    name = {
        "description": "Name of the CorpusPrecompute.",
        "type": "string",
        "pattern": _with_words(CORPUS_NAME),
    }
    corpus["properties"] = {"name": name, **corpus["properties"]}
    corpus["required"] = ["name", *(one for one in corpus["required"] if one != "service")]
    for route, mandatory in (("ingress", "hosts"), ("httpRoute", "parentRefs")):
        properties[route]["if"] = {"properties": {"enabled": {"const": True}}, "required": ["enabled"]}
        properties[route]["then"] = {"properties": {mandatory: {"minItems": 1}}, "required": [mandatory]}
    properties["global"] = {"description": "Values of a parent chart; nothing reads it.", "type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of kintsugi", **root}


def _with_words(pattern: Pattern) -> str:
    """Start the pattern with its words, repeated zero times so that they match nothing: helm's error quotes
    the pattern, and nothing else of the schema."""
    return f"^(?:{pattern.words}){{0}}{pattern[1:]}"


def _closed(schema: Schema) -> Schema:
    """Remove Kubernetes' extensions and forbid unknown keys."""
    kept = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if "pattern" in kept:
        kept["pattern"] = _with_words(kept["pattern"])
    if "properties" in kept:
        kept["properties"] = {name: _closed(one) for name, one in kept["properties"].items()}
        kept["additionalProperties"] = False
    for inner in ("items", "additionalProperties"):
        if isinstance(kept.get(inner), dict):
            kept[inner] = _closed(kept[inner])
    return kept


def values_yaml() -> str:
    """Every value with its default, and its meaning above it."""
    head = [
        "# Values of the chart, generated by scripts/chart_schema.py from its types; change them there.",
        "# Values that are commented out are unset.",
    ]
    return "\n".join([*head, *_lines(Values(), "", 0)]) + "\n"


def _lines(value: Any, path: str, depth: int) -> Iterator[str]:
    docs, hints = descriptions(type(value)), get_type_hints(type(value))
    indent = "  " * depth
    for one in fields_in_order(type(value)):
        name, inner = camel(one.name), getattr(value, one.name)
        where = f"{path}.{name}".lstrip(".")
        cls = dataclass_within(hints[one.name])
        if depth == 0:
            yield ""
        doc = docs.get(one.name) or (_first_line(cls) if depth == 0 and cls else "")
        for text in (doc, COMMENTS.get(where, "")):
            yield from (f"{indent}# {line}" for line in textwrap.wrap(text, LINE_MAX - depth * 2 - 2))
        if dataclasses.is_dataclass(inner):
            yield f"{indent}{name}:"
            yield from _lines(inner, where, depth + 1)
        elif inner is None:
            yield f"{indent}# {name}:"
        else:
            yield f"{indent}{name}: {_flow(to_manifest(inner))}"


def _flow(value: Any) -> str:
    """Write the value on one line, as in a YAML mapping."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _first_line(cls: type[Any]) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def render_files() -> dict[Path, str]:
    """Contents of the chart's generated files, by path."""
    return {
        CHART / "values.yaml": values_yaml(),
        CHART / "values.schema.json": json.dumps(values_schema(), indent=0, separators=(",", ":")) + "\n",
    }


def main() -> int:
    files = render_files()
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(CHART.parents[1])} is out of date: run scripts/chart_schema.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(files[path])
        print(f"wrote {path.relative_to(CHART.parents[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

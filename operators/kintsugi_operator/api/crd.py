"""The CRDs, generated from the types: structural OpenAPI, defaults, CEL rules, columns, status."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from kintsugi.core.settings import bounds_of, camel, default_of, fields_in_order, json_schema_bounds
from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.manifest import GROUP, VERSION, to_manifest
from kintsugi_operator.api.status import BlendServiceStatus, CorpusPrecomputeStatus

Schema = dict[str, Any]

NAME_RULE = {
    "rule": "self.metadata.name.matches('^[a-z][-a-z0-9]*$') && self.metadata.name.size() <= 63",
    "message": "the name must start with a letter, hold a-z, 0-9 and - only, and have at most 63 characters",
}
"""KubeRay derives Services from names, and label values have at most 63 characters."""

COLUMNS = {
    "BlendService": [
        ("Model", "string", ".status.model"),
        ("Valid", "string", '.status.conditions[?(@.type=="Valid")].status'),
        ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
        ("Shards", "string", ".status.shards"),
        ("Engines", "string", ".status.engines"),
        ("Blending", "string", '.status.conditions[?(@.type=="Blending")].status'),
        ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
        ("Age", "date", ".metadata.creationTimestamp"),
    ],
    "CorpusPrecompute": [
        ("Service", "string", ".spec.service"),
        ("Valid", "string", '.status.conditions[?(@.type=="Valid")].status'),
        ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
        ("Phase", "string", ".status.phase"),
        ("Documents", "integer", ".status.documents"),
        ("Chunks", "integer", ".status.chunks"),
        ("Coverage", "number", ".status.coverage"),
        ("Age", "date", ".metadata.creationTimestamp"),
    ],
}

PENDING: Schema = {
    "observedGeneration": -1,
    "conditions": [
        {
            "type": "Ready",
            "status": "Unknown",
            "reason": "Pending",
            "message": "no operator has reconciled this object yet",
            "lastTransitionTime": "1970-01-01T00:00:00Z",
        }
    ],
}
"""The status of an object that no operator has written to.

The API server drops the status of a new object, but fills in defaults whenever it reads the object from its
storage, so readers never see an object without a status. kstatus treats an object without
`observedGeneration` as current."""


SCALES = {
    "BlendService": {
        "specReplicasPath": ".spec.engines.replicas",
        "statusReplicasPath": ".status.engineReplicas",
        "labelSelectorPath": ".status.engineSelector",
    }
}
"""The scale subresource. With `engines.replicasMax`, it sets the minimum number of engines, and Ray Serve
adds more."""


def crds() -> dict[str, Schema]:
    """The CRDs by plural name."""
    return {
        "blendservices": _crd("BlendService", "bs", BlendServiceSpec, BlendServiceStatus),
        "corpusprecomputes": _crd("CorpusPrecompute", "cp", CorpusPrecomputeSpec, CorpusPrecomputeStatus),
    }


def schema_of(cls: type[Any]) -> Schema:
    """OpenAPI v3 schema of a dataclass, in the structural form that CRDs require."""
    hints, docs = get_type_hints(cls), descriptions(cls)
    properties: Schema = {}
    required = []
    for one in fields_in_order(cls):
        bounds, name = bounds_of(cls, one), camel(one.name)
        schema = _schema_of_annotation(hints[one.name], bounds)
        if one.name in docs:
            schema = {"description": docs[one.name], **schema}
        default = default_of(one)
        if default is dataclasses.MISSING:
            required.append(name)
        elif default is not None:
            schema["default"] = to_manifest(default)
        properties[name] = schema
    schema = {"type": "object", "description": _first_line(cls), "properties": properties}
    if required:
        schema["required"] = required
    if hasattr(cls, "REFUSED"):
        # Otherwise the API server would silently drop such a field.
        schema["x-kubernetes-preserve-unknown-fields"] = True
    if rules := getattr(cls, "RULES", ()):
        schema["x-kubernetes-validations"] = [rule.manifest() for rule in rules]
    return schema


def _crd(kind: str, short: str, spec: type[Any], status: type[Any]) -> Schema:
    singular = kind.lower()
    plural = f"{singular}s"
    columns = [dict(zip(("name", "type", "jsonPath"), one, strict=True)) for one in COLUMNS[kind]]
    root: Schema = {
        "type": "object",
        "description": _first_line(spec),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _in_words(schema_of(spec)),
            "status": {**_without_defaults(schema_of(status)), "default": PENDING},
        },
        "x-kubernetes-validations": [NAME_RULE],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": singular,
                "shortNames": [short],
                "categories": ["kintsugi"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}, **({"scale": SCALES[kind]} if kind in SCALES else {})},
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": root},
                }
            ],
        },
    }


def _schema_of_annotation(annotation: Any, bounds: Mapping[str, Any]) -> Schema:
    own, inner = json_schema_bounds(bounds), bounds.get("items", {})
    if get_origin(annotation) in (types.UnionType, Union):
        (annotation,) = [one for one in get_args(annotation) if one is not type(None)]
    origin = get_origin(annotation)
    if origin is tuple:
        items = _schema_of_annotation(get_args(annotation)[0], inner)
        listed: Schema = {"type": "array", "items": items, **own}
        if key := bounds.get("mapKey"):
            listed |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
        return listed
    if origin is not None and issubclass(origin, Mapping):
        value = get_args(annotation)[1]
        if value is Any:
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True, **own}
        mapped: Schema = {
            "type": "object",
            "additionalProperties": _schema_of_annotation(value, inner),
            **own,
        }
        if keys := bounds.get("keys"):
            rule, message = f"self.all(key, key in {list(keys)})", f"the keys are {', '.join(keys)}"
            mapped["x-kubernetes-validations"] = [{"rule": rule, "message": message}]
        return mapped
    if dataclasses.is_dataclass(annotation):
        assert isinstance(annotation, type)
        return schema_of(annotation)
    if issubclass(annotation, StrEnum):
        return {"type": "string", "enum": [str(one) for one in annotation], **own}
    if also := bounds.get("also"):  # other types: a Kubernetes schema allows one type or any type
        own["enum"] = [*own["enum"], *also]
        return {"x-kubernetes-preserve-unknown-fields": True, **own}
    names = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return {"type": names[annotation], **own}


def _in_words(schema: Schema) -> Schema:
    """The schema with each pattern replaced by a rule: the API server prints the regular expression of a
    violated pattern, but the message of a violated rule."""
    told = {key: _in_words_within(key, value) for key, value in schema.items() if key != "pattern"}
    if (pattern := schema.get("pattern")) is not None:
        rule = {"rule": f"self.matches('{pattern}')", "message": pattern.words}
        told["x-kubernetes-validations"] = [rule, *told.get("x-kubernetes-validations", ())]
    return told


def _in_words_within(key: str, value: Any) -> Any:
    if key == "properties":
        return {name: _in_words(one) for name, one in value.items()}
    return _in_words(value) if key in ("items", "additionalProperties") else value


def _without_defaults(schema: Schema) -> Schema:
    """The schema of a status, without defaults: the API server must not add to the status that the operator
    wrote."""
    kept = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in kept:
        kept["properties"] = {name: _without_defaults(one) for name, one in kept["properties"].items()}
    if isinstance(kept.get("items"), dict):
        kept["items"] = _without_defaults(kept["items"])
    return kept


def _first_line(cls: type[Any]) -> str:
    """The first paragraph of a class's docstring."""
    return inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def descriptions(cls: type[Any]) -> dict[str, str]:
    """The descriptions of fields: `description` where a field has one, else its docstring."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docstrings(base)
    told = {one.name: bounds_of(cls, one).get("description") for one in dataclasses.fields(cls)}
    return docs | {name: text for name, text in told.items() if text is not None}


@cache
def _docstrings(cls: type[Any]) -> dict[str, str]:
    """Docstrings of the fields that a class itself defines; Python does not keep them."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs

"""The pages of the CRDs and of the chart's values, from their schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from scripts.chart_schema import COMMENTS, values_schema
from scripts.reference.page import Entry, Page, Section, code, one_of

from kintsugi_operator.api.crd import crds

Schema = dict[str, Any]


def crd_page() -> Page:
    sections = []
    for crd in crds().values():
        kind = crd["spec"]["names"]["kind"]
        root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for part, sentence in (("spec", root["description"]), ("status", "What the operator reports.")):
            entries = list(_entries(root["properties"][part], ""))
            sections.append(Section(f"{kind}.{part}", sentence, entries, "field"))
    about = "Fields of the custom resources. [Operator](../OPERATOR.md) says what it makes of them."
    return Page("reference/crds.md", "Custom resources", about, sections)


def values_page() -> Page:
    sections = []
    for name, schema in values_schema()["properties"].items():
        own = Entry(name, str(schema.get("description", "")), _facts(schema))
        inner = list(_entries(schema, f"{name}."))
        sections.append(Section(name, own.sentence, inner or [own], "value"))
    about = (
        "Values of the chart `charts/kintsugi`. Helm refuses a wrong value before it renders anything. "
        "[Kubernetes](../KUBERNETES.md) says which ones to set."
    )
    return Page("reference/values.md", "Chart values", about, sections)


def _entries(schema: Schema, path: str) -> Iterator[Entry]:
    """Every property of an object, those that hold objects followed by their properties."""
    required = schema.get("required", ())
    for name, one in schema.get("properties", {}).items():
        where = f"{path}{name}"
        sentence = " ".join(filter(None, (str(one.get("description", "")), COMMENTS.get(where, ""))))
        facts = _facts(one)
        if name in required and "default" not in one:
            facts["default"] = "required"
        yield Entry(where, sentence, facts)
        yield from _entries(one, f"{where}.")
        for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
            if isinstance(one.get(key), dict):
                yield from _entries(one[key], f"{where}{mark}.")


def _facts(schema: Schema) -> dict[str, str]:
    kind = str(schema.get("type", "any"))
    if isinstance(schema.get("items"), dict):
        kind = f"array of {schema['items'].get('type', 'any')}"
    shown = one_of(schema["enum"]) if "enum" in schema else code(kind)
    default = schema.get("default")
    is_plain = default is not None and not isinstance(default, dict) and default != "" and default != []
    return {"type": shown, "default": code(json.dumps(default)) if is_plain else ""}

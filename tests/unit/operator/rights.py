"""The rights that the chart gives the operator. Read without helm: what varies in the template are names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

TEMPLATE = Path(__file__).resolve().parents[3] / "charts/kintsugi/templates/rbac.yaml"


def chart_rules() -> list[list[dict[str, Any]]]:
    """The rules of the operator's own role, and those of the role for its lease."""
    blocks = re.findall(r"^rules:\n(.*?)^---", TEMPLATE.read_text(), re.S | re.M)
    return [yaml.safe_load(re.sub(r"\{\{.*?\}\}", "x", block)) for block in blocks]


def expand_rules(rules: Iterable[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Group, resource and verb of everything that rules allow."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }

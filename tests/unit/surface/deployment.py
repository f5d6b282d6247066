"""What is installed and configured: CRDs, chart values, configuration files, packaging, environment."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from kintsugi.core import deploy
from kintsugi.engine.local import transfer_config
from kintsugi.store.client import registry
from kintsugi.store.client.options import UrlQuery as StoreUrlQuery
from kintsugi.store.protocol.access import AccessDocument as TokensFile
from tests.unit.surface.python_api import fields_of

REPOSITORY = Path(__file__).parents[3]
CHART = REPOSITORY / "charts/kintsugi"
SOURCES = ("services", "operators")

_PROSE = ("description", "message", "title")
_HINT = re.compile(r"\(\?:[^()]*\)\{0\}")
"""Matches nothing: a hint that helm quotes with the pattern."""
_VARIABLE = re.compile(r"KINTSUGI_[A-Z0-9_]*[A-Z0-9]")
_UNORDERED = ("required", "enum")


def crds() -> dict[str, Any]:
    """Every key of the committed CRDs, descriptions and messages apart."""
    found = {}
    for path in sorted((CHART / "crds").glob("*.yaml")):
        found[path.name] = _leaves(yaml.safe_load(path.read_text()))
    return found


def chart_values() -> dict[str, Any]:
    """Defaults, and what the schema allows."""
    return {
        "defaults": _leaves(yaml.safe_load((CHART / "values.yaml").read_text())),
        "schema": _leaves(json.loads((CHART / "values.schema.json").read_text())),
    }


def _leaves(value: Any) -> dict[str, Any]:
    """Every leaf by its path, in which `/` stands for `.properties.`: half of all characters, otherwise."""
    return {re.sub(r"(^|\.)properties\.", "/", path): leaf for path, leaf in _paths(value)}


def _paths(value: Any, path: str = "", under: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every leaf. A property may be called `message`: prose is text."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if not (key in _PROSE and isinstance(inner, str)):
                yield from _paths(inner, f"{path}.{key}".lstrip("."), key)
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for index, inner in enumerate(value):
            yield from _paths(inner, f"{path}[{index}]", under)
    elif isinstance(value, list) and under in _UNORDERED:
        yield path, sorted(value, key=str)
    else:
        yield path, _HINT.sub("", value) if isinstance(value, str) else value


def configuration() -> dict[str, Any]:
    """Keys, types and defaults of the files and URLs that users write."""
    return {
        "kintsugi serve --config": dict(_tree(deploy.ServiceSpec)),
        "tokens file": dict(_tree(TokensFile)),
        "store URL schemes": sorted(registry.SCHEMES),
        "store URL options": fields_of(StoreUrlQuery),
    }


def _tree(cls: type[Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Fields of a dataclass; those that hold dataclasses by the fields of these."""
    hints, shown = get_type_hints(cls), fields_of(cls)
    for name, hint in hints.items():
        if name not in shown:
            continue
        inner = _dataclass_in(hint)
        if inner is None:
            yield f"{path}{name}", shown[name]
        else:
            container = "list" if "list[" in shown[name] or "tuple[" in shown[name] else "object"
            yield f"{path}{name}", container if " = " not in shown[name] else f"{container}, optional"
            yield from _tree(inner, f"{path}{name}.")


def _dataclass_in(hint: Any) -> type[Any] | None:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    return next((found for one in get_args(hint) if (found := _dataclass_in(one))), None)


def packaging() -> dict[str, Any]:
    """Distributions, extras, entry points and the names by which other programs load our code."""
    files = [REPOSITORY / folder / "pyproject.toml" for folder in (".", "checkpoints", "operators")]
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    targets: dict[tuple[str, str], str] = {}
    for project in projects:
        groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
        targets |= {(group, name): target for group, some in groups.items() for name, target in some.items()}
    return {
        "distributions": [project["name"] for project in projects],
        "extras": sorted(projects[0]["optional-dependencies"]),
        "entry points": {
            f"{group} {name}": _resolved(group, target) for (group, name), target in targets.items()
        },
        "python -m": sorted(path.parent.name for path in REPOSITORY.glob("operators/*/__main__.py")),
        "kv_connector": transfer_config({})["kv_connector"],
        "serve import paths": [
            *(deploy.STORE_BUILDER, deploy.SERVICE_BUILDER),
            *(deploy.ENGINE_POLICY, deploy.SHARD_POLICY),
        ],
    }


def _resolved(group: str, target: str) -> str:
    """What an entry point leads to; where that lies is free. A plugin is imported before vLLM is."""
    module, name = target.split(":")
    if group.startswith("vllm."):
        code = f"import sys; sys.path[:0] = {sys.path!r}; sys.modules['vllm'] = None; import {module}"
        imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if imported.returncode:
            return f"does not import without vLLM: {imported.stderr.strip().splitlines()[-1]}"
    return "callable" if callable(getattr(import_module(module), name, None)) else "no callable"


def environment_variables() -> list[str]:
    """`KINTSUGI_*` names that the code holds as text."""
    found = set()
    for folder in SOURCES:
        for path in (REPOSITORY / folder).rglob("*.py"):
            source = path.read_text()
            if "KINTSUGI_" in source:
                texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
                found |= {text for text in texts if isinstance(text, str) and _VARIABLE.fullmatch(text)}
    return sorted(found)

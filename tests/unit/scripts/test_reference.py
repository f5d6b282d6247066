"""The generated reference: every public name is on its page, with a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from scripts.chart_schema import values_schema
from scripts.reference import __main__ as reference
from scripts.reference.page import Entry, Page, Section

from kintsugi.cli.main import app
from kintsugi_operator.api.crd import crds
from tests.unit.surface import snapshot

REPOSITORY = Path(__file__).parents[3]
METRIC = re.compile(r"\bkintsugi_(?:blend|gateway|http|quality|requests|store|ttft)[a-z_]*")
"""Ends with an underscore where a page names several, as `kintsugi_quality_*`."""


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {page.path: page for page in reference.pages()}


def names(page: Page) -> dict[str, set[str]]:
    return {section.title: {entry.name for entry in section.entries} for section in page.sections}


def exported(name: str) -> str:
    """A metric's name without the ends that its type adds; one counts `..._total` itself."""
    return name.removesuffix("_total").removesuffix("_total")


def test_every_setting_and_metric_has_a_sentence(pages: dict[str, Page]) -> None:
    assert [name for page in pages.values() for name in page.undocumented()] == []


def undescribed(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Properties of a schema, nested ones too, without a description."""
    for name, one in schema.get("properties", {}).items():
        if not one.get("description"):
            yield f"{path}.{name}"
        yield from undescribed(one, f"{path}.{name}")
        for inner in (one.get("items"), one.get("additionalProperties")):
            if isinstance(inner, dict):
                yield from undescribed(inner, f"{path}.{name}")


def test_every_value_and_field_has_a_sentence() -> None:
    found = list(undescribed(values_schema(), "values"))
    for crd in crds().values():
        root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
        found += [name for part in ("spec", "status") for name in undescribed(root[part], part)]
    assert found == []


def silent(command: Any, path: str) -> Iterator[str]:
    """Commands and options without help."""
    if not command.help and not getattr(command, "commands", {}):
        yield path
    for parameter in command.params:
        is_shown = not getattr(parameter, "hidden", False) and parameter.name != "help"
        if is_shown and not getattr(parameter, "help", None):
            yield f"{path} {parameter.name}"
    for name, inner in getattr(command, "commands", {}).items():
        yield from silent(inner, f"{path} {name}")


def test_every_command_and_option_has_a_sentence() -> None:
    assert list(silent(typer.main.get_command(app), "kintsugi")) == []


def test_every_recorded_setting_is_on_the_page(pages: dict[str, Page]) -> None:
    shown = {
        name.replace("[]", "").replace(".*", "")
        for name in names(pages["reference/configuration.md"])["Service"]
    }
    assert set(snapshot.recorded("configuration")["kintsugi serve --config"]) <= shown


CODE_NAME = re.compile(r"`(?!vllm\.)[\w.]*[A-Z]\w+`")
"""A constant or a class: no setting is called so, and no value either."""


def test_the_configuration_names_settings_and_values_and_nothing_of_the_code(pages: dict[str, Page]) -> None:
    *sections, _environment = pages["reference/configuration.md"].sections
    for entry in (one for section in sections for one in section.entries):
        assert not CODE_NAME.search(entry.sentence), (entry.name, entry.sentence)
        assert not re.search(r"\b(?!None|Any|Path)[A-Z]", entry.facts["type"]), entry


def test_metrics_that_pages_name_exist(pages: dict[str, Page]) -> None:
    of_process = names(pages["reference/metrics.md"])
    shown = {exported(name) for names_of in of_process.values() for name in names_of}
    for path in (REPOSITORY / "docs").rglob("*.md"):
        for name in METRIC.findall(path.read_text()):
            family = re.sub("_(bucket|count|sum|total)$", "", name)
            known = (
                any(one.startswith(name) for one in shown) if name.endswith("_") else {name, family} & shown
            )
            assert known, f"{path.name}: {name}"


def test_a_missing_sentence_is_reported() -> None:
    sections = [
        Section("one", "Said.", [Entry("a", "Said."), Entry("b", " ")]),
        Section("two", "", [Entry("c", "Said.")]),
    ]
    assert list(Page("x.md", "X", "", sections).undocumented()) == ["X: one: b", "X: two"]


def test_a_table_keeps_its_columns() -> None:
    entries = [
        Entry("a|b", "One\nline | <b> and `<c>`.", {"type": "`x|y`", "default": ""}),
        Entry("c", "Two.", {"default": ""}),
    ]
    text = Page("x.md", "X", "", [Section("s", "Said.", entries)]).markdown()
    assert "| `a|b` | `x|y` | One line \\| &lt;b> and `<c>`. |" in text
    assert "default" not in text


def test_every_result_is_on_the_page(tmp_path: Path) -> None:
    reference.write(tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    for path in (REPOSITORY / "benchmarks/results").glob("*.json"):
        assert f"\n## {path.stem}\n" in text
        for figure in json.loads(path.read_text())["figures"]:
            assert f"`{figure['name']}`" in text

"""The generated reference has every public name, and what has no sentence is reported."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripts import links
from scripts.reference import __main__ as reference
from scripts.reference import python_names, results
from scripts.reference.page import Entry, Page, Section

from tests.unit.surface import python_api, snapshot

METRIC = re.compile(r"\bkintsugi_(?:blend|gateway|http|requests|shadow|store|ttft)[a-z_]*")
"""Ends with an underscore where a page names several, as `kintsugi_shadow_*`."""


@dataclass
class Bare:
    field: int
    told: int
    """Said."""

    def method(self) -> None: ...

    @property
    def shown(self) -> int:
        """Said."""
        return self.field


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {page.path: page for page in reference.pages()}


def names(page: Page) -> dict[str, set[str]]:
    return {section.title: {entry.name for entry in section.entries} for section in page.sections}


def exported(name: str) -> str:
    """A metric's name without the ends that its type adds; one counts `..._total` itself."""
    return name.removesuffix("_total").removesuffix("_total")


def recorded(part: str) -> Any:
    return snapshot.recorded(part)


def test_nothing_public_is_without_a_sentence() -> None:
    assert reference.undocumented() == []


def test_every_recorded_option_is_on_the_page(pages: dict[str, Page]) -> None:
    shown = names(pages["reference/cli.md"])
    for command, options in recorded("command_line")["kintsugi"].items():
        wanted = {name for name in options if name.startswith("-")} - {"--json", "--help"}
        assert wanted - {"--install-completion", "--show-completion"} <= shown.get(command, set())


def test_every_recorded_setting_is_on_the_page(pages: dict[str, Page]) -> None:
    shown = {
        name.replace("[]", "").replace(".*", "")
        for name in names(pages["reference/configuration.md"])["Service"]
    }
    assert set(recorded("configuration")["kintsugi serve --config"]) <= shown


CODE_NAME = re.compile(r"`(?!vllm\.)[\w.]*[A-Z]\w+`")
"""A constant or a class: no setting is called so, and no value either."""


def test_the_configuration_names_settings_and_values_and_nothing_of_the_code(pages: dict[str, Page]) -> None:
    *sections, _environment = pages["reference/configuration.md"].sections
    for entry in (one for section in sections for one in section.entries):
        assert not CODE_NAME.search(entry.sentence), (entry.name, entry.sentence)
        assert not re.search(r"\b(?!None|Any|Path)[A-Z]", entry.facts["type"]), entry


def test_types_are_those_of_a_file(pages: dict[str, Page]) -> None:
    types = {
        entry.name: entry.facts["type"]
        for section in pages["reference/configuration.md"].sections[:-1]
        for entry in section.entries
    }
    for name, shown in {
        "engines.replicas": "mapping",
        "store.tiers": "list[mapping]",
        "limits": "mapping",
        "op": "blend | save | audit | off",
        "ack": "ram | durable",
        "query_layers": "list[int] | None",
        "tokens[].verbs": "list[generate | put | delete | list | admin | report] | None",
    }.items():
        assert types[name] == f"`{shown}`"


def test_every_recorded_metric_is_on_the_page(pages: dict[str, Page]) -> None:
    shown = names(pages["reference/metrics.md"])
    for process, families in recorded("metrics").items():
        found = {exported(name) for name in shown[process.capitalize()]}
        assert {exported(name) for name in families} <= found


def test_metrics_that_pages_name_exist(pages: dict[str, Page]) -> None:
    shown = {
        exported(name) for names_of in names(pages["reference/metrics.md"]).values() for name in names_of
    }
    for path in (results.REPOSITORY / "docs").rglob("*.md"):
        for name in METRIC.findall(path.read_text()):
            family = re.sub("_(bucket|count|sum|total)$", "", name)
            known = (
                {one for one in shown if one.startswith(name)}
                if name.endswith("_")
                else {name, family} & shown
            )
            assert known, f"{path.name}: {name}"


def test_every_recorded_message_is_on_the_page(pages: dict[str, Page]) -> None:
    text = pages["reference/protocol.md"].markdown()
    for package in recorded("wire_protocol").values():
        for kind in ("messages", "enums", "services"):
            for name in package.get(kind, {}):
                if not name.endswith("Entry"):  # of a map
                    assert f" {name}\n" in text, name


def test_every_result_is_on_the_page() -> None:
    text = results.markdown()
    for path in (results.REPOSITORY / results.RESULTS).glob("*.json"):
        assert f"\n## {path.stem}\n" in text
        for figure in json.loads(path.read_text())["figures"]:
            assert f"`{figure['name']}`" in text


def test_a_missing_sentence_is_reported() -> None:
    sections = [
        Section("one", "Said.", [Entry("a", "Said."), Entry("b", " ")]),
        Section("two", "", [Entry("c", "Said.")]),
        Section("three", "", [Entry("d", "")], must_be_described=False),
    ]
    assert list(Page("x.md", "X", "", sections).undocumented()) == ["X: one: b", "X: two"]


def test_a_missing_docstring_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_api, "CLASSES", ("here:Bare",))
    monkeypatch.setattr(python_api, "_found", lambda path: Bare)
    monkeypatch.setattr(python_api, "_is_ours", lambda one: getattr(one, "__module__", "") == __name__)
    found = [name.rsplit("Bare", 1)[1] for name in python_names.undocumented()]
    assert found == ["", ".field", ".method"]


def test_a_table_keeps_its_columns() -> None:
    entries = [
        Entry("a|b", "One\nline | <b> and `<c>`.", {"type": "`x|y`", "default": ""}),
        Entry("c", "Two.", {"default": ""}),
    ]
    text = Page("x.md", "X", "", [Section("s", "Said.", entries)]).markdown()
    assert "| `a|b` | `x|y` | One line \\| &lt;b> and `<c>`. |" in text
    assert "default" not in text


def test_the_generated_pages_are_those_that_links_know(tmp_path: Path) -> None:
    reference.write(tmp_path)
    made = {f"docs/{path.relative_to(tmp_path)}" for path in tmp_path.rglob("*.md")}
    assert made == links.GENERATED

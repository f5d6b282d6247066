"""Selectors and policies of other distributions, found by their entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import Selection
from kintsugi.core.plugins import SELECTORS, load_plugin, plugin_names
from kintsugi.core.request import BlendOptions, parse_selector
from tests.fakes.plugins import install

GROUP = "tests.things"


def test_the_class_of_an_entry_point_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, GROUP, "mine", "plugin_mine:Mine", "class Mine(dict):\n    pass\n")
    assert plugin_names(GROUP) == ("mine",)
    found = load_plugin(GROUP, "mine", "thing", dict)
    assert issubclass(found, dict)
    assert found.__name__ == "Mine"
    assert load_plugin(GROUP, "mine", "thing", dict) is found


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "raise OSError('no such library')",
            r"thing: 'bad', entry point .* imported \(OSError: no such",
        ),
        ("class Other:\n    pass\n", r"cannot be imported \(AttributeError"),
        ("class Bad:\n    pass\n", r"must be a subclass of builtins\.dict"),
        ("Bad = 5\n", r"must be a subclass of builtins\.dict"),
        ("def", r"cannot be imported \(SyntaxError"),
    ],
    ids=["raises", "lacks the class", "another class", "no class", "no Python"],
)
def test_one_that_cannot_be_used_is_named(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"plugin_{tmp_path.name}"
    install(tmp_path, monkeypatch, GROUP, "bad", f"{module}:Bad", code)
    with pytest.raises(InvalidField, match=message):
        load_plugin(GROUP, "bad", "thing", dict)


def test_a_selector_is_a_name_that_kintsugi_or_an_entry_point_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_selector("hkvd") == "hkvd"
    with pytest.raises(InvalidField, match=r"'added' is not one of hkvd, .*random$"):
        parse_selector("added")
    with pytest.raises(InvalidField, match="selector: 'added'"):
        Selection(0.1, "added")
    install(tmp_path, monkeypatch, SELECTORS, "added", "plugin_added:Added", "")
    assert parse_selector("added") == "added"
    assert BlendOptions.from_mapping({"selector": "added"}).selector == "added"
    with pytest.raises(InvalidField, match=r"random, added$"):
        parse_selector("other")

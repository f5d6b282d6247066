"""What may be configured, and that somebody reads it."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.core.plugins import SELECTORS
from kintsugi.core.request import SelectorName
from kintsugi.core.schema import load
from kintsugi.engine import config
from kintsugi.engine.config import EngineConfig
from kintsugi.store.shard.eviction.room import RATIO
from tests.fakes.plugins import install


def test_every_option_is_read_by_the_engine() -> None:
    """An option that nobody reads would be accepted and do nothing."""
    sources = Path(config.__file__).parent.rglob("*.py")
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert {field.name for field in dataclasses.fields(EngineConfig)} <= read


def test_an_option_that_is_none_is_an_error() -> None:
    with pytest.raises(UnknownField, match="match_content"):
        load(EngineConfig, {"match_content": False}, "kv_connector_extra_config")


@pytest.mark.parametrize("wrong", ["a b", "a" * 93, "a/-"])
def test_a_namespace_that_no_salt_can_narrow_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidField, match="discovery_namespace"):
        EngineConfig(discovery_namespace=wrong)


def test_shards_place_chunks_for_the_ratio_of_engines() -> None:
    assert EngineConfig.ratio == RATIO


def test_the_gate_tests_a_configured_selector_of_another_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, SELECTORS, "stride", "strides:Stride", "")
    assert EngineConfig(store="ram://x", selector="stride").tested_selector == "stride"
    assert EngineConfig(store="ram://x").tested_selector == SelectorName.QUERY
    assert EngineConfig(store="ram://x", selector=SelectorName.HYBRID).tested_selector == SelectorName.QUERY

"""A vLLM that lacks what blending needs is found out by names and signatures, and serves without."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import reload
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils

from kintsugi.core.request import PARAMS_KEY
from kintsugi.engine import connector, plugin
from kintsugi.engine.declining_connector import DecliningConnector
from kintsugi.engine.versions import RUN
from kintsugi.engine.worker.hooks import HOOKS, Hook, describe_missing, find_missing_hooks


def test_this_vllm_has_everything() -> None:
    assert find_missing_hooks() == []
    assert describe_missing() is None


def imported(node: ast.AST) -> Iterator[str]:
    """Names of vLLM that running `node` imports."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from imported(child)


def test_every_name_that_blending_imports_is_a_hook() -> None:
    folder = Path(connector.__file__).parent
    sources = [folder / "blending_connector.py"]
    sources += [*folder.glob("scheduler/*.py"), *folder.glob("worker/**/*.py")]
    needed = {name for source in sources for name in imported(ast.parse(source.read_text()))}
    assert len(needed) > 20
    known = {hook.module for hook in HOOKS}
    known |= {f"{hook.module}.{hook.attribute.split('.')[0]}" for hook in HOOKS}
    assert needed - known == set()


def test_a_signature_that_cannot_be_read_is_missed() -> None:
    assert Hook("builtins", "dict", "nothing").is_there
    assert not Hook("builtins", "dict", "nothing", ("name",)).is_there


def test_a_name_that_is_gone_is_named_with_the_versions_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(base, "KVConnectorTransferResults")
    reason = describe_missing()
    assert reason is not None
    assert reason.startswith("vllm_version: ")
    assert "KVConnectorTransferResults (reporting finished blends)" in reason
    assert all(version in reason for version in RUN)


def test_a_signature_that_changed_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "resolve_kv_cache_block_sizes", lambda config: (16, 16))
    assert [hook.attribute for hook in find_missing_hooks()] == ["resolve_kv_cache_block_sizes"]


def test_a_module_that_breaks_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no such device")

    monkeypatch.setitem(sys.modules, "breaks", Breaks("breaks"))
    assert not Hook("breaks", "name", "nothing").is_there


def test_importing_the_connector_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.delattr(base, "KVConnectorTransferResults")
        assert reload(connector).KintsugiConnector is DecliningConnector
    assert reload(connector).KintsugiConnector is not DecliningConnector


def test_registering_never_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    plugin.register()
    assert "has no KV connectors" in caplog.text


def test_only_those_who_asked_are_told_why() -> None:
    declining: Any = object.__new__(DecliningConnector)
    declining._reason = "vllm_version: too old"
    asked = SimpleNamespace(kv_transfer_params={PARAMS_KEY: {"namespace": "acme"}})
    _, answer = declining.request_finished(asked, [])
    assert answer[PARAMS_KEY]["outcome"] == "declined"
    assert answer[PARAMS_KEY]["reason"] == "vllm_version: too old"
    assert declining.request_finished(SimpleNamespace(kv_transfer_params=None), []) == (False, None)

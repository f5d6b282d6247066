"""A vLLM that lacks what an engine needs is found out by names and signatures, and does not start."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import reload
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils

from kintsugi.core.errors import Unavailable, VersionMismatch
from kintsugi.engine import connector, plugin
from kintsugi.engine.blending_connector import KintsugiConnector
from kintsugi.engine.versions import RUN
from kintsugi.engine.worker.hooks import (
    ALL_HOOKS,
    ENGINE_HOOKS,
    HOOKS,
    OPENAI_HOOKS,
    Hook,
    check_vllm,
    find_missing_hooks,
)

ENGINE = Path(connector.__file__).parent


def test_this_vllm_has_everything() -> None:
    assert find_missing_hooks(ALL_HOOKS) == []
    check_vllm(HOOKS)


def imported(node: ast.AST) -> Iterator[str]:
    """Names of vLLM that running `node` imports."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from imported(child)


def unknown_names(sources: Iterable[Path], hooks: Sequence[Hook]) -> set[str]:
    """What the sources import of vLLM that is none of the hooks."""
    needed = {name for source in sources for name in imported(ast.parse(source.read_text()))}
    assert needed
    modules = {(module, hook) for hook in hooks for module in hook.modules}
    known = {module for module, _ in modules}
    return needed - known - {f"{module}.{hook.attribute.split('.')[0]}" for module, hook in modules}


def test_every_name_that_blending_imports_is_a_hook() -> None:
    sources = [ENGINE / "blending_connector.py"]
    sources += [*ENGINE.glob("scheduler/*.py"), *ENGINE.glob("worker/**/*.py")]
    assert unknown_names(sources, HOOKS) == set()


def test_every_name_that_an_engine_or_its_openai_routes_import_is_a_hook() -> None:
    assert unknown_names(ENGINE.rglob("*.py"), ALL_HOOKS) == set()
    assert unknown_names(ENGINE.glob("openai/*.py"), OPENAI_HOOKS) == set()
    sources = [ENGINE / name for name in ("asynchronous.py", "watching.py")]
    assert unknown_names(sources, ENGINE_HOOKS) == set()


def test_a_name_that_moved_is_found_in_either_module() -> None:
    assert Hook(("no.such.module", "collections"), "OrderedDict", "nothing").exists
    assert not Hook(("no.such.module", "json"), "OrderedDict", "nothing").exists


def test_a_signature_that_cannot_be_read_is_missed() -> None:
    assert Hook(("builtins",), "dict", "nothing").exists
    assert not Hook(("builtins",), "dict", "nothing", ("name",)).exists


def test_a_name_that_is_gone_is_named_with_the_versions_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(base, "KVConnectorTransferResults")
    with pytest.raises(VersionMismatch) as raised:
        check_vllm(HOOKS)
    reason = str(raised.value)
    assert "KVConnectorTransferResults (blending)" in reason
    assert all(version in reason for version in RUN)


def test_a_signature_that_changed_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "resolve_kv_cache_block_sizes", lambda config: (16, 16))
    assert [hook.attribute for hook in find_missing_hooks()] == ["resolve_kv_cache_block_sizes"]


def test_an_engine_that_cannot_start_says_what_vllm_lacks_and_which_versions_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_vllm(ENGINE_HOOKS)
    with monkeypatch.context() as another:
        another.setitem(sys.modules, "vllm.usage.usage_lib", None)
        with pytest.raises(
            VersionMismatch, match=r"usage_lib\.UsageContext \(starting an engine\)"
        ) as raised:
            check_vllm(ENGINE_HOOKS)
    assert all(version in str(raised.value) for version in RUN)
    with monkeypatch.context() as another:
        another.setitem(sys.modules, "vllm.renderers.online_renderer", None)
        with pytest.raises(VersionMismatch, match=r"OnlineRenderer \(OpenAI's routes\)"):
            check_vllm(OPENAI_HOOKS)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(Unavailable, match="vLLM cannot be imported"):
        check_vllm(ENGINE_HOOKS)


def test_a_module_that_breaks_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no such device")

    monkeypatch.setitem(sys.modules, "breaks", Breaks("breaks"))
    assert not Hook(("breaks",), "name", "nothing").exists


def test_a_connector_is_not_loaded_on_a_vllm_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.delattr(base, "KVConnectorTransferResults")
        with pytest.raises(VersionMismatch, match="KVConnectorTransferResults"):
            reload(connector)
    assert reload(connector).KintsugiConnector is KintsugiConnector


def test_registering_never_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    plugin.register()
    assert "has no KV connectors" in caplog.text

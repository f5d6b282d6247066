"""Modules of version 0.1 that have moved are still importable, and say where they went."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

MOVED = {
    "kintsugi.client.chunking": "kintsugi.precompute.chunking",
    "kintsugi.client.langchain": "kintsugi.sdk.langchain",
    "kintsugi.client.llama_index": "kintsugi.sdk.llama_index",
    "kintsugi.client.sdk": "kintsugi.sdk.client",
    "kintsugi.client.sdk_types": "kintsugi.sdk.types",
}


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_module_is_the_new_one_and_warns(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"import {new} instead"):
        module = import_module(old)
    assert module is import_module(new)

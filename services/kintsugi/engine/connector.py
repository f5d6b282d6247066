"""`KintsugiConnector`, the class that vLLM loads by name.

It blends where vLLM has every name that blending needs, and declines every blend elsewhere. Importing this
module never fails on a vLLM that has connectors at all.
"""

from __future__ import annotations

from typing import Any

from kintsugi.engine.worker.hooks import find_missing_hooks


def _connector_class() -> Any:
    if find_missing_hooks():
        from kintsugi.engine.declining_connector import DecliningConnector

        return DecliningConnector
    from kintsugi.engine.blending_connector import BlendingConnector

    return BlendingConnector


KintsugiConnector = _connector_class()

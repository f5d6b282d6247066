"""`KintsugiConnector`, the class that vLLM loads by name.

Importing this module raises `VersionMismatch` if vLLM lacks a name that blending needs: then vLLM does not
start.
"""

from kintsugi.engine.worker.hooks import HOOKS, check_vllm

check_vllm(HOOKS)

from kintsugi.engine.blending_connector import KintsugiConnector  # noqa: E402

__all__ = ["KintsugiConnector"]

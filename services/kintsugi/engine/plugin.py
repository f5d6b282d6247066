"""The plugin of every vLLM process: registers the connector (entry point `vllm.general_plugins`), and ends
the process if its parent was killed."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import threading

from kintsugi.engine.versions import WORKING

logger = logging.getLogger(__name__)

CONNECTOR = "KintsugiConnector"
_watching = threading.Event()


def register() -> None:
    """Register the connector. vLLM calls this when it loads plugins, at least once per process. Never raises:
    a vLLM without connectors continues to serve."""
    if multiprocessing.parent_process() is not None:
        # A core or worker that vLLM starts collects its whole heap several times before it is ready. Each
        # time takes 0.3 s for the modules that it has imported, which are not garbage.
        gc.freeze()
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(CONNECTOR, "kintsugi.engine.connector", CONNECTOR)
    except (ImportError, AttributeError) as error:
        logger.warning("This vLLM has no KV connectors, so it runs without Kintsugi (%s). %s", error, WORKING)


def end_with_parent() -> None:
    """End this process when the process that started it by multiprocessing ends. Without this, vLLM's cores
    would keep their memory and the GPU's. Idempotent."""
    parent = multiprocessing.parent_process()
    if parent is None or _watching.is_set():
        return
    _watching.set()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="kintsugi-parent", daemon=True).start()

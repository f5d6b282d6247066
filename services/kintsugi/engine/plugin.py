"""What every vLLM process needs of us: the connector (entry point `vllm.general_plugins`), and an end when
its parent was killed."""

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
    """Called by vLLM when it loads plugins, once per process and possibly more often. Never raises: a vLLM
    without connectors serves on."""
    if multiprocessing.parent_process() is not None:
        # A core or worker that vLLM starts collects its whole heap several times before it is ready. Each
        # time takes 0.3 s for the modules that it has imported, which are not garbage.
        gc.freeze()
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(CONNECTOR, "kintsugi.engine.connector", CONNECTOR)
    except (ImportError, AttributeError) as error:
        logger.warning("This vLLM has no KV connectors, so Kintsugi is not in it (%s). %s", error, WORKING)


def end_with_parent() -> None:
    """Ends this process with the one that started it, if multiprocessing did. vLLM's own cores would keep
    their memory, and their GPU's. Idempotent."""
    parent = multiprocessing.parent_process()
    if parent is None or _watching.is_set():
        return
    _watching.set()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="kintsugi-parent", daemon=True).start()

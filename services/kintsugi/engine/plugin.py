"""Registers the connector in every vLLM process (entry point `vllm.general_plugins`)."""

from __future__ import annotations

import gc
import logging
import multiprocessing

from kintsugi.engine.versions import WORKING

logger = logging.getLogger(__name__)

CONNECTOR = "KintsugiConnector"


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

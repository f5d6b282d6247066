"""Registers the connector in every vLLM process (entry point `vllm.general_plugins`)."""

from __future__ import annotations

CONNECTOR = "KintsugiConnector"


def register() -> None:
    """Called by vLLM when it loads plugins, once per process and possibly more often."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kintsugi.engine.connector", CONNECTOR)

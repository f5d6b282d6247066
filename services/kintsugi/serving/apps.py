"""The application builders that the generated Serve configuration names."""

from __future__ import annotations

from typing import Any

from kintsugi.core.deploy import ENGINE_DEPLOYMENT, GATEWAY_DEPLOYMENT, SHARD_DEPLOYMENT
from kintsugi.serving.engine_replica import EngineReplica
from kintsugi.serving.gateway_replica import GatewayReplica
from kintsugi.serving.store_shard import StoreShard


def store_app(args: dict[str, Any]) -> Any:
    """Build the application that `core.deploy.store_application` configures."""
    from ray import serve

    return serve.deployment(StoreShard, name=SHARD_DEPLOYMENT).bind(args["store"])


def service_app(args: dict[str, Any]) -> Any:
    """Build the application that `core.deploy.service_application` configures. The gateway is its ingress."""
    from ray import serve

    engine = serve.deployment(EngineReplica, name=ENGINE_DEPLOYMENT).bind(
        args["model"], args["engines"], args["store_url"], args["host"]
    )
    return serve.deployment(GatewayReplica, name=GATEWAY_DEPLOYMENT).bind(
        engine, args["model"], args["store_url"]
    )

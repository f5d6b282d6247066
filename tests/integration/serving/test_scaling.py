"""The generated autoscaling configuration in a real Serve: our policy reads what replicas report."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kintsugi.core.deploy import ENGINE_DEPLOYMENT, EngineSpec, service_application
from tests.integration.serving.conftest import Deployed, eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_busy_engines_get_another(deployed: Deployed) -> None:
    from ray import serve

    spec = dataclasses.replace(deployed.service.spec, engines=EngineSpec(replicas=1, replicas_max=2))
    (engine,) = (one for one in service_application(spec)["deployments"] if one["name"] == ENGINE_DEPLOYMENT)
    scaling: dict[str, Any] = {**engine["autoscaling_config"], "upscale_delay_s": 0.5}

    class Busy:
        """Reports as an engine does that prefills without a pause."""

        def record_autoscaling_stats(self) -> dict[str, float]:
            return {"waiting_tokens": 0.0, "tokens_per_s": 1000.0, "busy_share": 1.0}

    application = serve.deployment(
        Busy, name="Busy", autoscaling_config=scaling, ray_actor_options={"num_cpus": 0.1}
    )
    serve.run(application.bind(), name="scaling", route_prefix=None)
    try:

        def running() -> int:
            deployments = serve.status().applications["scaling"].deployments
            return int(deployments["Busy"].replica_states.get("RUNNING", 0))

        assert running() >= 1
        assert eventually(lambda: running() == 2, 60.0)
    finally:
        serve.delete("scaling")

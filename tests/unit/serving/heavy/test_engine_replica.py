"""A replica is an engine: what Serve may ask of it before and after it runs; no vLLM and no Ray that run."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys

import pytest

pytest.importorskip("ray.serve", reason="install the extra `serving`")

from kintsugi.core.errors import Unavailable
from kintsugi.core.exchange import EngineBackend
from kintsugi.serving.engine_replica import EngineReplica


def test_serves_builders_do_not_import_vllm() -> None:
    """Serve's controller imports them, and vLLM takes seconds and gigabytes."""
    check = "import sys, kintsugi.serving.apps; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=120).returncode == 0


def test_a_replica_that_has_ended_reports_nothing_and_answers_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(EngineReplica, "__del__")  # Serve awaits it, the garbage collector would not

    async def ask() -> None:
        replica = EngineReplica.__new__(EngineReplica)
        assert isinstance(replica, EngineBackend)
        assert await replica.record_routing_stats() == {}
        assert await replica.record_autoscaling_stats() == {}
        with pytest.raises(Unavailable):
            replica.check_health()
        with pytest.raises(Unavailable):
            await replica.info()
        await replica.close()
        await replica.close()

    asyncio.run(ask())


@pytest.mark.parametrize("name", ["generate", "openai"])
def test_what_serve_streams_is_a_generator_function(name: str) -> None:
    """Serve would run any other method in a thread, and refuse the generator that it returns."""
    assert inspect.isasyncgenfunction(getattr(EngineReplica, name))


def test_the_collector_is_off_during_a_start_and_ignores_what_that_leaves() -> None:
    check = """
import gc
from kintsugi.serving.engine_replica import collector_off
try:
    with collector_off():
        assert not gc.isenabled()
        raise OSError
except OSError:
    pass
assert gc.isenabled() and gc.get_freeze_count() > 10_000
"""
    assert subprocess.run([sys.executable, "-c", check], timeout=120).returncode == 0

"""A replica is an engine: what Serve may ask of it before and after it runs; no vLLM and no Ray that run."""

from __future__ import annotations

import asyncio
import inspect
import logging
import logging.config
import subprocess
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="install the extra `serving`")

from kintsugi.core.errors import Unavailable
from kintsugi.core.exchange import EngineBackend
from kintsugi.serving.engine_replica import EngineReplica, serve_log_kept


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


def test_serve_s_log_survives_that_vllm_configures_logging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that restarts asks each replica for its file, and replaced every engine."""
    from ray.serve._private.logging_utils import get_component_logger_file_path

    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr("ray._private.worker._global_node", node)
    logger = logging.getLogger("ray.serve")
    file = logging.FileHandler(tmp_path / "replica.log")
    monkeypatch.setattr(logger, "handlers", [MemoryHandler(1, target=file)])
    with serve_log_kept():
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    assert get_component_logger_file_path() == "/replica.log"
    logger.warning("still written")
    assert "still written" in (tmp_path / "replica.log").read_text()
    file.close()

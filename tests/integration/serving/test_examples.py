"""The examples, as a reader runs them, against a gateway with a stub for an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.store.protocol.access import TokenFile
from tests.integration.serving.gateways import Running, Setup, running, token_file

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    path, tokens = token_file(tmp_path_factory.mktemp("tokens"), ("reader", ("notes", "light*")))
    with running(Setup(gateway={"access": TokenFile(path)})) as gateway:
        yield gateway, tokens["reader"]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_the_async_sdk(guarded: tuple[Running, str]) -> None:
    gateway, token = guarded
    done = run("sdk_async.py", "--address", gateway.address, "--token", token)
    assert done.returncode == 0, done.stderr
    assert "stored: " in done.stdout
    assert "made up by a stub" in done.stdout
    assert "blended: " in done.stdout


def test_raw_grpc(guarded: tuple[Running, str]) -> None:
    gateway, token = guarded
    done = run("raw_grpc.py", "--address", gateway.address, "--token", token)
    assert done.returncode == 0, done.stderr
    assert "is tokens [1, " in done.stdout
    assert "blended: 2 chunks loaded" in done.stdout


def test_raw_grpc_shows_why_it_is_refused(guarded: tuple[Running, str]) -> None:
    gateway, token = guarded
    done = run("raw_grpc.py", "--address", gateway.address, "--token", token, "--namespace", "theirs")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "PERMISSION_DENIED" in done.stderr
    assert "may not use namespace 'theirs'" in done.stderr

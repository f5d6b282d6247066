"""The HTTP front end over TLS: whose certificate is needed, and files that change."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import httpx
import pytest

from kintsugi.core import errors
from kintsugi.core.exchange import CHAT_PATH
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.store.protocol.tls import TlsFiles
from tests.fakes.openai_backend import ScriptedBackend, gateway_over
from tests.integration.store.test_tls import issue
from tests.unit.gateway.fronts.test_http import CHAT, run


@pytest.mark.parametrize("mutual", [True, False])
def test_tls(tmp_path: Path, mutual: bool) -> None:
    files = issue(tmp_path / "tls")
    trusting = ssl.create_default_context(cafile=str(files.ca))
    known = ssl.create_default_context(cafile=str(files.ca))
    known.load_cert_chain(files.cert, files.key)

    async def body() -> None:
        app = HttpFront(gateway_over(ScriptedBackend())).app
        served = TlsFiles(files.ca if mutual else None, files.cert, files.key)
        server = HttpServer(app, "127.0.0.1", 0, served)
        await server.start()
        url = f"https://{server.address}{CHAT_PATH}"
        try:
            async with httpx.AsyncClient(verify=known) as caller:
                assert (await caller.post(url, json=CHAT)).status_code == 200
            async with httpx.AsyncClient(verify=trusting) as caller:
                if mutual:
                    with pytest.raises(httpx.TransportError):
                        await caller.post(url, json=CHAT)
                else:
                    assert (await caller.post(url, json=CHAT)).status_code == 200
        finally:
            await server.stop()

    run(body)


@pytest.mark.parametrize("mutual", [False, True])
def test_tls_files_are_read_again_when_they_change(tmp_path: Path, mutual: bool) -> None:
    async def body() -> None:
        files = issue(tmp_path / "tls")
        before = client_context(files)
        served = TlsFiles(files.ca if mutual else None, files.cert, files.key)
        server = HttpServer(HttpFront(gateway_over(ScriptedBackend())).app, "127.0.0.1", 0, served)
        await server.start()
        try:
            assert await is_served(server.address, before)
            shutil.copytree(tmp_path / "tls", tmp_path / "old")
            issue(tmp_path / "tls")
            assert await is_served(server.address, client_context(files))
            assert not await is_served(server.address, before)
            trusting = ssl.create_default_context(cafile=str(files.ca))
            trusting.load_cert_chain(tmp_path / "old" / files.cert.name, tmp_path / "old" / files.key.name)
            assert await is_served(server.address, trusting) is not mutual, "of the authority that is gone"
            after = client_context(files)
            files.key.write_bytes(b"half of it")
            assert await is_served(server.address, after), "with what it had"
        finally:
            await server.stop()

    run(body)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Trusts the folder's authority, and shows its certificate."""
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.cert, files.key)
    return context


async def is_served(address: str, context: ssl.SSLContext) -> bool:
    async with httpx.AsyncClient(verify=context) as caller:
        try:
            return (await caller.get(f"https://{address}/healthz")).status_code == 200
        except httpx.TransportError:
            return False


def test_tls_files_that_are_none_are_named(tmp_path: Path) -> None:
    files = issue(tmp_path / "tls")
    files.key.write_bytes(b"no key")
    app = HttpFront(gateway_over(ScriptedBackend())).app
    for key, message in ((files.key, "its key or its authority"), (tmp_path / "missing", "cannot be read")):
        with pytest.raises(errors.InvalidField, match=message):
            HttpServer(app, "127.0.0.1", 0, TlsFiles(None, files.cert, key))

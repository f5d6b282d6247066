"""A host that is lost without a word: no FIN, no RST, and another host at its address later."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from kintsugi.sdk.transport import ClientOptions, Transport
from kintsugi.store.client.directory import GrpcDirectory, ShardAddress, ShardMap
from kintsugi.store.protocol import tls
from kintsugi.store.protocol.wire import CLIENT_OPTIONS, CONNECTION_OPTIONS
from tests.fakes.directory_server import serving_directory
from tests.fakes.fixed_directory import FixedDirectory
from tests.waiting import wait_until


class Address:
    """An address that leads to a host, until `lose`: then its connections are silent, and new ones lead to
    another host."""

    def __init__(self, stack: ExitStack, host: str) -> None:
        self._host = host
        self._lost: set[socket.socket] = set()
        self._open: set[socket.socket] = set()
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.text = f"127.0.0.1:{self._listener.getsockname()[1]}"
        stack.callback(self._close)
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, successor: str) -> None:
        self._lost |= self._open
        self._host = successor

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            name, _, port = self._host.rpartition(":")
            far = socket.create_connection((name, int(port)))
            self._open |= {near, far}
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if source not in self._lost:
                    sink.sendall(data)
        except OSError:
            return

    def _close(self) -> None:
        for one in self._open:
            one.close()


def serve_map(stack: ExitStack, version: int) -> tuple[str, ShardMap]:
    shards = ShardMap(version, (ShardAddress("a", f"127.0.0.1:{version}"),), directory="d", epoch=version)
    return stack.enter_context(serving_directory(FixedDirectory(shards))), shards


def test_the_watch_of_a_lost_directory_finds_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    options = tuple((name, value // 30 if "_ms" in name else value) for name, value in CLIENT_OPTIONS)
    monkeypatch.setattr(tls, "CLIENT_OPTIONS", options)
    with ExitStack() as stack:
        (first, old), (second, new) = serve_map(stack, 1), serve_map(stack, 2)
        address = Address(stack, first)
        directory = GrpcDirectory(address.text)
        stack.callback(directory.close)
        assert directory.current() == old
        address.lose(second)
        wait_until(lambda: directory.current() == new, within_s=20)


def test_no_client_waits_for_minutes_before_it_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[Any]] = []
    make = grpc.insecure_channel

    def spy(address: str, options: Any = ()) -> Any:
        seen.append(set(options))
        return make(address, options=options)

    monkeypatch.setattr(grpc, "insecure_channel", spy)
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda address, options: spy(address, options))
    tls.open_channel("127.0.0.1:1", None).close()
    for is_blocking in (True, False):
        Transport("127.0.0.1:1", ClientOptions(), is_blocking)
    assert [options >= set(CONNECTION_OPTIONS) for options in seen] == [True, True, True]

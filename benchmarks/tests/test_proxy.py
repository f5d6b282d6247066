"""The proxy that hangs in the middle of an answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from benchmarks.support.proxy import HangingProxy, hanging_proxy


def echo(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_echo_one, args=(connection,), daemon=True).start()


def _echo_one(connection: socket.socket) -> None:
    with connection:
        while piece := connection.recv(1024):
            connection.sendall(piece)


@pytest.fixture
def proxy() -> Iterator[HangingProxy]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with hanging_proxy(f"127.0.0.1:{listener.getsockname()[1]}") as proxy:
            yield proxy


def connected(proxy: HangingProxy) -> socket.socket:
    host, port = proxy.address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read(connection: socket.socket, count: int) -> bytes:
    answer = b""
    while len(answer) < count:
        answer += connection.recv(count - len(answer))
    return answer


def test_it_forwards_until_it_hangs_in_the_middle_of_an_answer(proxy: HangingProxy) -> None:
    with connected(proxy) as first:
        first.sendall(b"0123456789")
        assert read(first, 10) == b"0123456789"
        assert proxy.returned_bytes == 10
        proxy.hang_after(4)
        assert not proxy.hangs
        first.sendall(b"abcdefghij")
        assert read(first, 4) == b"abcd"
        assert proxy.hangs
        with connected(proxy) as second:
            second.sendall(b"is anybody there")
            for connection in (first, second):
                connection.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    connection.recv(1)

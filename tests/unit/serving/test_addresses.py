"""Hosts and ports."""

from __future__ import annotations

import socket

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi.serving.addresses import free_port, is_wildcard, joined


def test_ipv6_is_bracketed() -> None:
    assert joined("127.0.0.1", 7) == "127.0.0.1:7"
    assert joined("::1", 7) == joined("[::1]", 7) == "[::1]:7"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::]"])
def test_all_interfaces_are_no_address(host: str) -> None:
    assert is_wildcard(host)
    assert not is_wildcard("127.0.0.1")


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"{port} to {port} of 127.0.0.1 are all taken"):
            free_port("127.0.0.1", port, 1)
        assert free_port("127.0.0.1", port, 16) > port

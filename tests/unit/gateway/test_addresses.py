"""Hosts and ports."""

from __future__ import annotations

import errno
import socket

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi.gateway.addresses import advertised_address, format_address, free_port, is_wildcard


def test_ipv6_is_bracketed() -> None:
    assert format_address("127.0.0.1", 7) == "127.0.0.1:7"
    assert format_address("::1", 7) == format_address("[::1]", 7) == "[::1]:7"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::]"])
def test_all_interfaces_are_no_address(host: str) -> None:
    assert is_wildcard(host)
    assert not is_wildcard("127.0.0.1")


@pytest.mark.parametrize(
    ("listen", "node_ip", "advertised"),
    [
        ("127.0.0.1:7410", "10.0.0.9", "127.0.0.1:7410"),
        ("10.0.0.7:7410", "10.0.0.9", "10.0.0.7:7410"),
        ("0.0.0.0:7410", "10.0.0.9", "10.0.0.9:7410"),
        ("[::]:7410", "fd00::9", "[fd00::9]:7410"),
    ],
)
def test_others_are_told_an_address_that_they_can_connect_to(
    listen: str, node_ip: str, advertised: str
) -> None:
    assert advertised_address(listen, node_ip) == advertised


def test_a_ray_on_loopback_does_not_say_where_others_reach_a_server() -> None:
    host, _, port = advertised_address("0.0.0.0:7410", "127.0.0.1").rpartition(":")
    with socket.socket() as listener:
        listener.bind((host, 0))
    assert port == "7410"


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port} is in use"):
            free_port("127.0.0.1", port, 1)
        assert free_port("127.0.0.1", port, 16) > port


def test_an_address_that_is_not_ours_is_not_called_taken() -> None:
    reason = r"192\.0\.2\.1:7500 cannot be bound \(Cannot assign requested address\)"
    with pytest.raises(Unavailable, match=reason):
        free_port("192.0.2.1", 7500, 16)


def test_a_port_that_needs_rights_is_not_called_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:80 cannot be bound \(Permission denied\)"):
        free_port("127.0.0.1", 80, 16)

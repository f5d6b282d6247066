"""Which ports processes listen on."""

from __future__ import annotations

import ipaddress
import os

import psutil


def find_exposed() -> tuple[list[str], int]:
    """The listening sockets of this process and its descendants that other machines can reach, and how many
    sockets there are in all."""
    exposed, count = [], 0
    this = psutil.Process(os.getpid())
    for process in (this, *this.children(recursive=True)):
        try:
            sockets = process.net_connections("inet")
            name = " ".join(process.cmdline())[:80]
        except psutil.NoSuchProcess:
            continue
        for found in sockets:
            if found.status != psutil.CONN_LISTEN and found.type.name != "SOCK_DGRAM":
                continue
            count += 1
            address = ipaddress.ip_address(found.laddr.ip)
            if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
                address = address.ipv4_mapped
            if not address.is_loopback:
                exposed.append(f"{found.laddr.ip}:{found.laddr.port} of {process.pid} ({name})")
    return exposed, count

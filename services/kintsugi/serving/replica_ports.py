"""Keeps the ports that Ray Serve opens in replicas where Ray's own are."""

from __future__ import annotations

from typing import Any

from kintsugi.store.protocol.tls import is_loopback


def keep_replica_on_loopback() -> None:
    """On a Ray that listens on loopback alone, makes Serve do the same in this replica.

    Serve opens a port for other deployments on all interfaces, runs what it is sent there, and asks for no
    token. Call this in the constructor of a replica: Serve opens the port behind it.
    """
    import ray
    from ray.serve._private import replica

    node_ip = ray.util.get_node_ip_address()
    if not is_loopback(f"{node_ip}:0"):
        return
    add_port = replica.add_port_to_grpc_server

    def add_loopback_port(server: Any, address: str) -> int:
        port: int = add_port(server, address.replace("[::]", node_ip))
        return port

    replica.add_port_to_grpc_server = add_loopback_port

"""Keeps the ports that Ray Serve opens in replicas on the interface of Ray's own ports."""

from __future__ import annotations

from typing import Any

from kintsugi.store.protocol.tls import is_loopback


def keep_replica_on_loopback() -> None:
    """Make Serve listen on loopback alone in this replica if Ray does.

    Serve opens a port on all interfaces and runs any code that it receives there, without authentication.
    Call this in a replica's constructor, since Serve opens the port after it.
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

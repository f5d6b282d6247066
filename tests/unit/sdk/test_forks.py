"""A program that uses the SDK and forks, as `subprocess` does with some options."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import kintsugi
kintsugi.Client  # imports gRPC
import grpc, os, subprocess, threading
from concurrent.futures import ThreadPoolExecutor

class Endless(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_stream_rpc_method_handler(lambda request, context: iter(lambda: os.urandom(9), b""))

server = grpc.server(ThreadPoolExecutor(1))
server.add_generic_rpc_handlers((Endless(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
call = grpc.insecure_channel(f"127.0.0.1:{port}").unary_stream("/a/b")(b"")
next(call)
threading.Thread(target=lambda: list(call), daemon=True).start()
for _ in range(10):
    subprocess.run(["true"], preexec_fn=lambda: None)
os._exit(0)
"""


def test_a_fork_beside_a_call_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

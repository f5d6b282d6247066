"""An S3 server that can be made to hang: moto's, behind a proxy of its connections.

moto serves in a process of its own: where Flask is imported, vLLM 0.32 starts on no CPU (its dispatcher looks
into every name of every module, and Flask's `current_app` raises).
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from socket import SHUT_RDWR, create_connection, create_server, socket
from typing import Any, Self
from urllib.request import Request, urlopen

import pytest

boto3 = pytest.importorskip("boto3", reason="needs moto: make setup")
if find_spec("moto") is None:
    pytest.skip("needs moto: make setup", allow_module_level=True)

BUCKET = "chunks"
REGION = "us-east-1"
_SERVE = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@cache
def _moto_port() -> int:
    """Start the server that all tests of this process share. It ends with the process. Returns its port."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None

    @atexit.register
    def end() -> None:
        server.communicate()

    return int(server.stdout.readline())


class S3Server:
    """A server with nothing but the empty bucket `BUCKET`, one at a time. A context manager."""

    def __init__(self) -> None:
        self._target = ("127.0.0.1", _moto_port())
        self._listener = create_server(("127.0.0.1", 0))
        self._hangs = threading.Event()
        self._streams: set[socket] = set()
        self.client: Any = None
        """boto3's, on the server itself: it never hangs."""

    def __enter__(self) -> Self:
        url = "http://{}:{}".format(*self._target)
        with urlopen(Request(f"{url}/moto-api/reset", method="POST")):
            pass
        credentials = {"aws_access_key_id": "id", "aws_secret_access_key": "secret"}
        self.client = boto3.client("s3", endpoint_url=url, region_name=REGION, **credentials)
        self.client.create_bucket(Bucket=BUCKET)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._close_streams()
        self.client.close()

    @property
    def endpoint(self) -> str:
        host, port = self._listener.getsockname()
        return f"http://{host}:{port}"

    def hang(self) -> None:
        """Take calls from now on, and answer none."""
        self._hangs.set()

    def resume(self) -> None:
        """Answer again."""
        self._hangs.clear()
        self._close_streams()

    def names(self) -> list[str]:
        """The objects in the bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def read(self, name: str) -> bytes:
        """The bytes of an object."""
        body: bytes = self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        return body

    def replace(self, name: str, body: bytes) -> None:
        """Have an object hold other bytes."""
        self.client.put_object(Bucket=BUCKET, Key=name, Body=body)

    def forget(self) -> None:
        """Delete every object."""
        for name in self.names():
            self.client.delete_object(Bucket=BUCKET, Key=name)

    def _close_streams(self) -> None:
        for stream in list(self._streams):
            with suppress(OSError):
                stream.shutdown(SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = create_connection(self._target)
                self._streams |= {near, far}
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket, sink: socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._hangs.is_set():
                    continue  # it is read, and nothing comes of it
                sink.sendall(data)
        for stream in (source, sink):
            with suppress(OSError):
                stream.shutdown(SHUT_RDWR)
        self._streams -= {source, sink}
        source.close()

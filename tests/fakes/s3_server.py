"""An S3 server that can be made to hang: moto's, behind a proxy of its connections."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from typing import Any, Self

import pytest

boto3 = pytest.importorskip("boto3", reason="needs moto: make setup")
moto_server = pytest.importorskip("moto.server", reason="needs moto: make setup")

BUCKET = "chunks"
REGION = "us-east-1"


class S3Server:
    """A server with the bucket `BUCKET`. A context manager."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._hangs = threading.Event()
        self._streams: set[socket.socket] = set()
        self.client: Any = None
        """boto3's, on the server itself: it never hangs."""

    def __enter__(self) -> Self:
        self._server.start()
        host, port = self._server.get_host_and_port()
        self._target = (host, int(port))
        credentials = {"aws_access_key_id": "id", "aws_secret_access_key": "secret"}
        self.client = boto3.client(
            "s3", endpoint_url=f"http://{host}:{port}", region_name=REGION, **credentials
        )
        self.client.create_bucket(Bucket=BUCKET)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._close_streams()
        self._server.stop()

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
                stream.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._streams |= {near, far}
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._hangs.is_set():
                    continue  # it is read, and nothing comes of it
                sink.sendall(data)
        for stream in (source, sink):
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        self._streams -= {source, sink}
        source.close()

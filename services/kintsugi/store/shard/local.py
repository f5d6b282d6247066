"""Hands the arena's descriptor to peers of the same host. Each token is valid once; only gRPC issues tokens.

A peer with the descriptor can read every namespace, so a shard issues tokens only if `--share-arena` allows
it, and the descriptor is read-only and sealed. In a pod, only the pod's containers share the socket's folder.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections import OrderedDict
from pathlib import Path

from kintsugi.store.shard.tiers.ram_tier import Arena

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
TOKENS_MAX = 64
TOKEN_LIFE_S = 10.0
_PEER_TIMEOUT_S = 2.0
_CROWDED_S = 0.1


class ArenaDoor:
    """A unix socket in a folder that only this user may enter. Serves one peer at a time."""

    def __init__(self, arena: Arena, folder: Path | None = None) -> None:
        self._arena = arena
        self._folder = Path(tempfile.mkdtemp(prefix="kintsugi-", dir=folder))
        self.path = self._folder / "arena"
        self._tokens: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        os.chmod(self.path, 0o600)
        self._listener.listen(16)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="kintsugi-door", daemon=True)
        self._thread.start()

    def issue(self) -> bytes:
        """Return a token that is valid once, for `TOKEN_LIFE_S`."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._tokens[token] = time.monotonic() + TOKEN_LIFE_S
            while len(self._tokens) > TOKENS_MAX:
                self._tokens.popitem(last=False)
        return token

    def _redeem(self, token: bytes) -> bool:
        with self._lock:
            return self._tokens.pop(token, 0.0) > time.monotonic()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:  # such as no free descriptors: the peer waits in the backlog
                log.warning("cannot accept a peer for the arena: %s", error)
                time.sleep(_CROWDED_S)
                continue
            with peer:
                if self._closed:
                    return
                try:
                    self._admit(peer)
                except OSError as error:
                    log.warning("a peer left before it received the arena: %s", error)

    def _admit(self, peer: socket.socket) -> None:
        peer.settimeout(_PEER_TIMEOUT_S)
        token = peer.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        if not self._redeem(token):
            log.warning("refused a peer: its token is unknown, used or expired")
            return
        fd = self._arena.read_only_fd()
        try:
            socket.send_fds(peer, [b"\0"], [fd])
        finally:
            os.close(fd)

    def close(self) -> None:
        """Accept no more peers. Peers keep an arena that they have mapped."""
        self._closed = True
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as last:
            last.connect(str(self.path))
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

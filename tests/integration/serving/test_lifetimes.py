"""How long chunks are kept, from the SDK to a shard over real gRPC, and over its restart."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kintsugi import Client
from kintsugi.core.errors import InvalidField
from kintsugi.core.request import TTL_S_MAX
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.fill import FillConfig
from kintsugi.sdk.prefetching import Prefetcher
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from tests.fakes.stub_backend import _zeros
from tests.integration.serving.gateways import Running, Setup, running

NAMESPACE = "lifetimes"
PASSAGES = ["A first passage about kintsugi.", "A second passage about lacquer."]
QUESTION = "\nQuestion: what is it?\nAnswer:"
MIB = 1 << 20


class Service:
    """A gateway over a shard with a disk."""

    def __init__(self, gateway: Running, shard: Shard) -> None:
        self.gateway = gateway
        self.shard = shard

    def left_s(self, key: str) -> float:
        """How long the shard still keeps a chunk."""
        entry = self.shard.table.get((NAMESPACE, ChunkKey.from_hex(key)))
        assert entry is not None
        return entry.expires_at_s - time.time()


@contextmanager
def serving(folder: Path) -> Iterator[Service]:
    with ExitStack() as stack:
        spec = ShardSpec(8 * MIB, folder / "data", (SsdSpec(folder / "disk", 16 * MIB),))
        shard = open_shard(spec)
        server = stack.enter_context(ShardServer(shard, "127.0.0.1:0"))
        store = GrpcStore(server.address, GrpcOptions(ack="durable"))
        setup = Setup(store=store, gateway={"fill": FillConfig(sights=1)})
        yield Service(stack.enter_context(running(setup)), shard)
    shard.close()


def test_what_is_put_is_kept_as_long_as_asked_also_over_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as service, Client(service.gateway.address, NAMESPACE) as client:
        passing, lasting = (
            client.put_chunks([text], ttl_s=ttl_s)[0].key
            for text, ttl_s in zip(PASSAGES, (3600.0, None), strict=True)
        )
        assert 3500.0 < service.left_s(passing) <= 3600.0
        assert service.left_s(lasting) == math.inf
        assert client.put_chunks(PASSAGES, ttl_s=60.0)[0].state == "present"
        assert 3500.0 < service.left_s(passing) <= 3600.0, "a put never shortens a lifetime"
        client.put_chunks(PASSAGES, ttl_s=7200.0)
        assert 7100.0 < service.left_s(passing) <= 7200.0
        assert service.left_s(lasting) == math.inf
        expected = service.left_s(passing) + time.time()
    with serving(tmp_path) as service, Client(service.gateway.address, NAMESPACE) as client:
        assert service.left_s(passing) + time.time() == pytest.approx(expected, abs=1e-3)
        assert service.left_s(lasting) == math.inf
        client.put_chunks(PASSAGES[:1])
        assert service.left_s(passing) == math.inf
    with serving(tmp_path) as service:
        assert service.left_s(passing) == math.inf


def test_a_put_over_a_discovered_chunk_makes_it_last(tmp_path: Path) -> None:
    with serving(tmp_path) as service, Client(service.gateway.address, NAMESPACE) as client:
        (text,) = client.tokenize(PASSAGES[:1])
        space = service.gateway.backend.space(NAMESPACE)
        service.gateway.store.put(*_zeros(space, text.token_ids, time.time()), ttl_s=60.0)
        assert service.left_s(text.key) <= 60.0
        (put,) = client.put_chunks(PASSAGES[:1])
        assert (put.key, put.state) == (text.key, "present")
        assert service.left_s(text.key) == math.inf
        assert service.gateway.backend.seen.saves == []


def test_what_a_request_misses_is_filled_for_as_long_as_it_allows(tmp_path: Path) -> None:
    with serving(tmp_path) as service, Client(service.gateway.address, NAMESPACE) as client:
        answer = client.generate(PASSAGES[:1], QUESTION, ttl_s=3600.0)
        (key,) = (segment.key for segment in answer.segments)
        assert service.gateway.eventually(lambda: client_has(service, key))
        assert 3500.0 < service.left_s(key) <= 3600.0


def client_has(service: Service, key: str) -> bool:
    return service.shard.table.get((NAMESPACE, ChunkKey.from_hex(key))) is not None


def test_retrievers_put_with_a_lifetime(tmp_path: Path) -> None:
    with serving(tmp_path) as service, Client(service.gateway.address, NAMESPACE) as client:
        begun = Prefetcher(client, put=True, ttl_s=3600.0).prefetch(PASSAGES[:1])
        assert begun is not None
        begun.result(10.0)
        (text,) = client.tokenize(PASSAGES[:1])
        assert service.gateway.eventually(lambda: client_has(service, text.key))
        assert service.left_s(text.key) <= 3600.0
        with pytest.raises(InvalidField, match="ttl_s"):
            Prefetcher(client, put=True, ttl_s=0.0)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, math.nan, 2 * TTL_S_MAX, math.inf])
def test_an_impossible_lifetime_is_refused_with_what_to_do(ttl_s: float) -> None:
    advice = "leave it out" if math.isfinite(ttl_s) else "must be a finite number"
    with running() as gateway, Client(gateway.address, NAMESPACE) as client:
        with pytest.raises(InvalidField, match=f"ttl_s: .*{advice}"):
            client.put_chunks(PASSAGES, ttl_s=ttl_s)
        with pytest.raises(InvalidField, match=f"ttl_s: .*{advice}"):
            client.generate(PASSAGES, QUESTION, ttl_s=ttl_s)
        assert gateway.backend.seen.saves == []

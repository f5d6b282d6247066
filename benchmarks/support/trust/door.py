"""Measures denial of service before authentication: the cost of attacks in memory and in locked-out callers.

A gateway, a shard and a shard directory run in a process of their own. While an attack runs, a caller with a
token asks the gateway over HTTP and gRPC, each time on a new connection; a question that is refused or takes
longer than a second counts as locked out.
"""

from __future__ import annotations

import asyncio
import gzip
import multiprocessing
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from grpc_health.v1.health_pb2 import HealthCheckRequest

from benchmarks.support import http2
from benchmarks.support.figures import Figure
from kintsugi.core.exchange import CHAT_PATH
from kintsugi.gateway.access import add_grant, new_token
from kintsugi.rpc.v1 import gateway_pb2 as pb

RSS_GROWTH_MIB_MAX = 16.0
PROBE_S, PROBE_LATE_S = 0.1, 1.0
SAMPLE_S = 0.02
WARM_UP_PROBES = 30
HEADS, HEAD_BYTES = 150, 1 << 20
SLOW, TOKENLESS, WATCHES = 150, 1040, 520
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
BOMBS, BOMB_BYTES = 128, 64 << 20
"""Per port: 8 MB on the wire, 8 GiB if all were decompressed."""
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
POST = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\n".encode()
HALF_A_HEADER = bytes([0, 0x40, 0, 1, 0, 0, 0, 0, 1]) + b"\x40\x7f\x81\x7d" + b"x" * 16_000


@dataclass(frozen=True)
class Target:
    """The servers under attack."""

    grpc: str
    http: str
    shard: str
    directory: str
    tokens: dict[str, str]
    hold_s: float
    """How long connections are held open."""
    seed: int


Attack = Callable[[Target], Coroutine[Any, Any, None]]


async def send_heads(target: Target) -> None:
    """Headers without an end, as fast as they are read."""
    letters = random.Random(target.seed).randbytes(64).hex().encode()

    async def send() -> None:
        with suppress(ConnectionError):
            _, writer = await connect(target.http)
            writer.write(POST + b"X: ")
            for _ in range(HEAD_BYTES // len(letters)):
                writer.write(letters)
                await writer.drain()

    await asyncio.gather(*(send() for _ in range(HEADS)))


async def send_slowly(target: Target) -> None:
    """Send one byte of a head each second."""

    async def send() -> None:
        with suppress(ConnectionError):
            _, writer = await connect(target.http)
            for letter in POST * 10:
                writer.write(bytes([letter]))
                await writer.drain()
                await asyncio.sleep(1.0)

    with suppress(TimeoutError):
        async with asyncio.timeout(target.hold_s):
            await asyncio.gather(*(send() for _ in range(SLOW)))


async def hold_bodies(target: Target) -> None:
    """Requests without a token whose bodies do not come."""
    await hold(target, target.http, POST + b"Content-Length: 1000\r\n\r\n{", TOKENLESS)


async def hold_nothing(target: Target) -> None:
    """Connections that send nothing."""
    await hold(target, target.http, b"", TOKENLESS)


async def hold_half_headers(target: Target) -> None:
    """Half of the headers of a call, on gRPC."""
    await hold(target, target.grpc, http2.open_connection() + HALF_A_HEADER, SLOW)


async def call_without_token(target: Target) -> None:
    """Calls without a token, on gRPC, that send no message."""
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        calls = [channel.stream_stream("/kintsugi.rpc.v1.Kintsugi/Generate")() for _ in range(TOKENLESS)]
        await asyncio.gather(*(call.code() for call in calls))


async def send_bombs(target: Target) -> None:
    """Calls without a token on each port in turn, whose compressed messages are 64 MiB each."""
    bomb = gzip.compress(bytes(BOMB_BYTES), 9)
    head = b"Content-Encoding: gzip\r\nContent-Type: application/json\r\n"
    whole = POST + head + b"Content-Length: %d\r\n\r\n" % len(bomb) + bomb

    async def send(address: str, sent: bytes) -> None:
        with suppress(ConnectionError):
            reader, writer = await connect(address)
            writer.write(sent)
            await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(target.hold_s):
                    while await reader.read(1 << 16):
                        pass
            writer.close()

    await asyncio.gather(*(send(target.http, whole) for _ in range(BOMBS)))
    for address, method in (
        (target.grpc, "/kintsugi.rpc.v1.Kintsugi/PutChunk"),
        (target.shard, "/kintsugi.rpc.v1.ChunkStore/Lookup"),
        (target.directory, "/kintsugi.rpc.v1.ShardDirectory/WatchShardMap"),
    ):
        calls = [http2.call(path, bomb, {"grpc-encoding": "gzip"}) for path in (method, HEALTH_CHECK)]
        sent = [http2.open_connection() + call for call in calls] * (BOMBS // 2)
        await asyncio.gather(*(send(address, one) for one in sent))


async def watch(target: Target) -> None:
    """Idle health watches of one tenant."""
    metadata = (("authorization", f"Bearer {target.tokens['greedy']}"),)
    request = HealthCheckRequest().SerializeToString()
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        method = channel.unary_stream("/grpc.health.v1.Health/Watch")
        calls = [method(request, metadata=metadata) for _ in range(WATCHES)]
        await asyncio.sleep(target.hold_s)
        for call in calls:
            call.cancel()


ATTACKS: tuple[Attack, ...] = (
    send_heads,
    send_slowly,
    hold_bodies,
    hold_nothing,
    hold_half_headers,
    call_without_token,
    send_bombs,
    watch,
)


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def hold(target: Target, address: str, sent: bytes, count: int) -> None:
    """Opens connections one after the other, sends on each, and holds all of them."""
    writers = []
    for _ in range(count):
        with suppress(ConnectionError):
            _, writer = await connect(address)
            writer.write(sent)
            writers.append(writer)
    await asyncio.sleep(target.hold_s)
    for writer in writers:
        writer.close()


async def probe(target: Target) -> bool:
    """Whether a caller with a token is answered in time, over HTTP and gRPC."""
    bearer = f"Bearer {target.tokens['modest']}"
    request = pb.TokenizeRequest(namespace="modest", texts=["a"]).SerializeToString()
    options = (("grpc.use_local_subchannel_pool", 1),)
    try:
        async with asyncio.timeout(PROBE_LATE_S):
            async with httpx.AsyncClient() as client:
                url = f"http://{target.http}{CHAT_PATH}"
                response = await client.post(url, json=CHAT, headers={"authorization": bearer})
                response.raise_for_status()
            async with grpc.aio.insecure_channel(target.grpc, options=options) as channel:
                method = channel.unary_unary("/kintsugi.rpc.v1.Kintsugi/Tokenize")
                await method(request, metadata=(("authorization", bearer),))
    except (TimeoutError, httpx.HTTPError, grpc.RpcError):
        return False
    return True


def _run(attack: Attack, target: Target) -> None:
    asyncio.run(attack(target))


async def run_attack(attack: Attack, target: Target, gateway: psutil.Process) -> tuple[float, float]:
    """Seconds in which the caller was locked out, and the gateway's largest growth in MiB."""
    for _ in range(WARM_UP_PROBES):
        if not await probe(target):
            raise RuntimeError("the gateway does not answer before the attack")
    before, most, locked_out_s = gateway.memory_info().rss, 0, 0.0

    async def sample() -> None:
        nonlocal most
        while True:
            most = max(most, gateway.memory_info().rss - before)
            await asyncio.sleep(SAMPLE_S)

    sampling = asyncio.create_task(sample())
    # In a separate process, because the attack would otherwise delay the caller's own questions.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as attacker:
        running = attacker.submit(_run, attack, target)
        is_answered = True
        while not (running.done() and is_answered):
            began_s = time.monotonic()
            is_answered = await probe(target)
            await asyncio.sleep(PROBE_S)
            if not is_answered:
                locked_out_s += time.monotonic() - began_s
    sampling.cancel()
    running.result()
    return locked_out_s, most / (1 << 20)


@contextmanager
def serving(hold_s: float, seed: int) -> Iterator[tuple[Target, psutil.Process]]:
    """Servers of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path, tokens = Path(folder) / "tokens.json", {}
        for name in ("greedy", "modest"):
            tokens[name], grant = new_token(name, (name,))
            add_grant(path, grant)
        command = [sys.executable, "-m", "benchmarks.support.trust.door_server", str(path)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            try:
                assert process.stdout is not None
                grpc_at, http_at, shard, directory = process.stdout.readline().split()
                target = Target(grpc_at, http_at, shard, directory, tokens, hold_s, seed)
                yield target, psutil.Process(process.pid)
            finally:
                process.kill()


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """Runs each attack on servers of its own; the figures are the worst of all attacks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
    found: dict[str, tuple[float, float]] = {}
    for attack in ATTACKS:
        with serving(2.0 if quick else 15.0, seed) as (target, process):
            found[attack.__name__] = asyncio.run(run_attack(attack, target, process))
    locked = ", ".join(f"{name} {locked_s:.1f}" for name, (locked_s, _) in found.items())
    grown = ", ".join(f"{name} {mib:.1f}" for name, (_, mib) in found.items())
    locked_s, mib = (max(values) for values in zip(*found.values(), strict=True))
    return [
        Figure.at_most("preauth_rss_growth_mib", mib, RSS_GROWTH_MIB_MAX, "MiB", grown),
        Figure.at_most("preauth_locked_out_s", locked_s, 0.0, "s", locked),
    ]

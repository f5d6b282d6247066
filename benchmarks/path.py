"""Measures how much of our code one request uses: the files that a `PutChunk` enters until it is on disk, and
the async generators through which one streamed OpenAI answer passes.

Usage: python benchmarks/path.py [--save]

A gateway with both fronts, an engine of the bundled model, whose core is a process of its own, and a shard
with an SSD tier and durable puts run as they are deployed, but for Ray: the engine is called in this process.

`putchunk_files`: files under `services/kintsugi` of which the third `PutChunk` calls a function of more than
one statement, in any thread of either process, until the chunk is durable. Left out are generated code,
functions that also run in an idle time as long as the request (those of background loops), and functions of
one statement (properties, conversions), which a reader need not open; `putchunk_files_all` counts those, too.

`openai_nested_generators`: async generators of ours that are alive while a streamed chat completion is sent,
and were not before. Those of context managers are left out, as no token passes them.

`file_lines_max`: lines of the longest of those files. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import mmap
import os
import sys
import tempfile
import threading
import types
from collections.abc import AsyncIterator
from contextlib import _AsyncGeneratorContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import grpc
import httpx

import kintsugi
from benchmarks.support.figures import Figure, report
from kintsugi.core.deploy import GatewaySpec
from kintsugi.engine.asynchronous import AsyncEngine, AsyncSpec, launch
from kintsugi.gateway.fronts.grpc_server import GatewayServer
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.gateway.gateway import Gateway
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.rpc.v1.gateway_pb2_grpc import KintsugiStub
from kintsugi.serving.ray_backend import RayBackend
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.ram_tier import RamTier

HOUSE = str(Path(kintsugi.__file__).parent)
TRACE = "KINTSUGI_BENCH_TRACE"
"""Folder for the calls of all processes."""
IDLE, BUSY = 1, 2
FILES_BAR = 45
GENERATORS_BAR = 4
LINES_BAR = 600
CHUNK = "The kiln of the village was built in 1702 by three potters, who shared its wood and its heat. "
NAMESPACE = "bench"


def window(folder: Path) -> mmap.mmap:
    """One byte, shared by all processes, that says what is being recorded."""
    path = folder / "window"
    if not path.exists():
        path.write_bytes(b"\0")
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


def record_calls(folder: Path) -> None:
    """Record the functions of ours that this process calls in any thread."""
    shared = window(folder)
    seen: dict[types.CodeType, set[int]] = {}
    lock = threading.Lock()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        now = shared[0]
        code = frame.f_code
        if not now or event != "call" or now in seen.get(code, ()):
            return
        with lock:
            seen.setdefault(code, set()).add(now)
        name = code.co_filename
        is_function = bool(code.co_flags & 0x02) and not code.co_name.startswith("<")
        if name.startswith(HOUSE) and is_function:
            with (folder / f"calls-{os.getpid()}").open("a") as file:
                file.write(f"{now} {name} {code.co_firstlineno}:{code.co_qualname}\n")

    sys.setprofile(note)
    threading.setprofile(note)


class _Answer:
    """The result of a handle's method: an awaitable that can also be iterated."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __await__(self) -> Any:
        return self._answer.__await__()

    def __aiter__(self) -> Any:
        return self._answer

    def cancel(self) -> None:
        """Do nothing, because answers are read to their end."""


class _Method:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> _Answer:
        return _Answer(self._method(*arguments))


class _Handle:
    """A Serve handle whose replica lives in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def options(self, stream: bool) -> _Handle:
        return self

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._engine, name))


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """The addresses of gRPC and HTTP."""
    disk = DiskTier("ssd0", Home(folder / "ssd0", "shard"), 256 << 20)
    shard = Shard(RamTier(64 << 20), [disk], "shard")
    with ShardServer(shard, "127.0.0.1:0", ServerOptions(durable_by_default=True)) as store:
        url = f"grpc://{store.address}"
        connector = {"quality": "off", "loading_controller": False}
        arguments = {"max_model_len": 2048, "kv_cache_memory_bytes": 128 << 20}
        spec = AsyncSpec(str(bundled_checkpoint()), "tiny", url, extra_config=connector, vllm_args=arguments)
        engine = AsyncEngine(spec, await launch(spec, lambda binding: None))
        await engine.warm_up()
        options = GatewaySpec(grpc_port=0)
        gateway = await Gateway.open(options, RayBackend(_Handle(engine)), url, bundled_checkpoint())
        server = GatewayServer(gateway, options)
        http = HttpServer(HttpFront(gateway).app, "127.0.0.1", 0)
        await server.start()
        await http.start()
        try:
            yield server.address, http.address
        finally:
            await http.stop()
            await server.stop()
            await gateway.close()
            await engine.close()


async def put(address: str, text: str) -> float:
    """Store a chunk, and return how many seconds it took."""
    async with grpc.aio.insecure_channel(address) as channel:
        began_s = asyncio.get_running_loop().time()
        answer = await KintsugiStub(channel).PutChunk(
            pb.PutChunkRequest(namespace=NAMESPACE, chunk=pb.Content(text=text), wait=True)
        )
        assert answer.result.state == pb.PUT_STATE_STORED, answer
        return asyncio.get_running_loop().time() - began_s


async def trace_put(address: str, folder: Path) -> dict[str, set[str]]:
    """The functions that one put called, by file, without those of background loops."""
    shared = window(folder)
    took_s = 0.0
    for number in range(2):
        took_s = await put(address, f"{number}. {CHUNK * 6}")
    await asyncio.sleep(1.0)  # what follows a put in the background has ended
    shared[0] = IDLE
    await asyncio.sleep(took_s)
    shared[0] = BUSY
    await put(address, f"2. {CHUNK * 6}")
    shared[0] = 0
    calls: dict[str, set[str]] = {str(IDLE): set(), str(BUSY): set()}
    for trace in folder.glob("calls-*"):
        for line in trace.read_text().splitlines():
            now, place = line.split(" ", 1)
            calls[now].add(place)
    files: dict[str, set[str]] = {}
    for place in calls[str(BUSY)] - calls[str(IDLE)]:
        name, function = place.split(" ", 1)
        if "/rpc/" not in name:
            files.setdefault(name.removeprefix(HOUSE + "/"), set()).add(function)
    return files


def find_short(name: str) -> set[str]:
    """The functions of a file that have one statement besides their docstring, as `trace_put` names them."""
    short = set()
    for node in ast.walk(ast.parse((Path(HOUSE) / name).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if sum(isinstance(one, ast.stmt) for part in body for one in ast.walk(part)) <= 1:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                short.add(str(first))
    return short


def own_generators() -> list[str]:
    """Async generators of ours that have begun and not ended, without those of context managers."""
    objects = gc.get_objects()
    managers = {id(one.gen) for one in objects if type(one) is _AsyncGeneratorContextManager}
    return [
        f"{one.ag_code.co_filename.removeprefix(HOUSE + '/')} {one.ag_code.co_qualname}"
        for one in objects
        if type(one) is types.AsyncGeneratorType
        and one.ag_frame is not None
        and one.ag_code.co_filename.startswith(HOUSE)
        and id(one) not in managers
    ]


async def trace_chat(address: str) -> list[str]:
    """The generators that the events of a chat's answer pass."""
    before = own_generators()
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": CHUNK}],
        "max_tokens": 400,
        "stream": True,
        "ignore_eos": True,
    }
    during: list[str] = []
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"http://{address}/v1/chat/completions", json=body) as answer,
    ):
        async for _ in answer.aiter_lines():
            during = during or own_generators()
    for name in before:
        during.remove(name)
    return during


async def measure(folder: Path) -> tuple[dict[str, set[str]], list[str]]:
    async with served(folder) as (rpc, http):
        return await trace_put(rpc, folder), await trace_chat(http)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/path.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[TRACE] = folder
        record_calls(Path(folder))
        files, generators = asyncio.run(measure(Path(folder)))
        sys.setprofile(None)
    longer = [name for name in files if {call.split(":")[0] for call in files[name]} - find_short(name)]
    lines = {name: len((Path(HOUSE) / name).read_text().splitlines()) for name in longer}
    for name in sorted(files):
        print(f"{lines.get(name, 0):4} {name}: {', '.join(sorted(files[name]))}", file=sys.stderr)
    for name in generators:
        print(f"generator {name}", file=sys.stderr)
    figures = [
        Figure.at_most("putchunk_files", len(longer), FILES_BAR, "files"),
        Figure.at_most("putchunk_files_all", len(files), None, "files"),
        Figure.at_most("openai_nested_generators", len(generators), GENERATORS_BAR, "generators"),
        Figure.at_most("file_lines_max", max(lines.values()), LINES_BAR, "lines"),
    ]
    config = {"model": "bundled", "files": sorted(longer), "generators": generators}
    report("path", config, figures, "path" if arguments.save else None)


if __name__ == "__mp_main__" and TRACE in os.environ:  # vLLM spawned the engine's core
    record_calls(Path(os.environ[TRACE]))

if __name__ == "__main__":
    main()

"""What 100 BlendServices cost the operator: memory, CPU, and writes at rest.

One process keeps the objects (the tests' fake, over HTTP on loopback); another is the operator's queue,
workers and API client as they run in a pod, kopf imported, with KubeRay played by the first. Each service has
two shards with an SSD tier, a ready store and ready engines. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import aiohttp
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

import kintsugi_operator.operator  # noqa: F401  as in a pod: kopf and all
from kintsugi_operator.controller.cluster import ApiServer
from kintsugi_operator.controller.queue import ObjectKey, WorkQueue
from kintsugi_operator.controller.reconcile import LATER_S, Reconciler, utc_now
from kintsugi_operator.controller.scrape import Web
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import FakeCluster, FakeKubeRay

SERVICES = 100
MIB = 1 << 20


class Keeper:
    """The first process: the API server's part, and KubeRay's."""

    def __init__(self, services: int) -> None:
        self.cluster = FakeCluster()
        self._api_server = FakeApiServer(self.cluster)
        self._kuberay = FakeKubeRay(self.cluster)
        for index in range(services):
            self.cluster.put(_blend_service(f"service-{index}"))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Handle any request."""
        if request.path == "/serve":
            self._play_kuberay()
            return web.json_response({})
        if request.path == "/writes":
            return web.json_response({"writes": self.cluster.writes.total()})
        return await self._api_server.answer(request)

    def _play_kuberay(self) -> None:
        for name in self.cluster.named("RayService"):
            self._kuberay.serve(name)
        for name in self.cluster.named("RayJob"):
            self._kuberay.finish(name)


def keep_objects(ready: Connection, services: int) -> None:
    """Serve until the process is ended."""
    asyncio.run(_serve(ready, Keeper(services)))


async def _serve(ready: Connection, keeper: Keeper) -> None:
    app = web.Application(client_max_size=16 * MIB)
    app.router.add_route("*", "/{path:.*}", keeper.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready.send(runner.addresses[0][1])
    await asyncio.Event().wait()


def _blend_service(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "kintsugi.dev/v1alpha1",
        "kind": "BlendService",
        "metadata": {"name": name},
        "spec": {
            "model": {"path": "/models/small"},
            "image": {"repository": "registry.example/kintsugi/serving-cpu"},
            "gateway": {"insecure": True},
            "store": {"shards": 2, "tiers": [{"name": "nvme", "gib": 100}]},
        },
    }


async def operate(port: int, services: int, seconds: float) -> dict[str, Any]:
    """The second process."""
    url = f"http://127.0.0.1:{port}"
    looks = 0
    async with ApiClient(Configuration(host=url)) as client, aiohttp.ClientSession() as session:
        reconciler = Reconciler(ApiServer(client), Web(session), utc_now)

        async def look(key: ObjectKey) -> float | None:
            nonlocal looks
            again_s = await reconciler.service(key.namespace, key.name)
            looks += 1
            return again_s

        queue = WorkQueue(look, time.monotonic)
        workers = [asyncio.create_task(queue.run()) for _ in range(4)]
        keys = [ObjectKey("BlendService", "default", f"service-{index}") for index in range(services)]

        async def all_looked_at() -> None:
            aim = looks + services
            for key in keys:
                queue.add(key, 0.0)
            while looks < aim:
                await asyncio.sleep(0.05)

        async def writes() -> int:
            return int((await (await session.get(f"{url}/writes")).json())["writes"])

        await all_looked_at()
        for _ in range(4):
            await session.get(f"{url}/serve", timeout=aiohttp.ClientTimeout(total=120))
            await all_looked_at()
        written, seen = await writes(), looks
        begun_s, cpu_s = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        spent_s, passed_s = time.process_time() - cpu_s, time.monotonic() - begun_s
        result = {
            "services": services,
            "writes_to_get_there": written,
            "writes_at_rest": await writes() - written,
            "looks_at_rest": looks - seen,
            "seconds_at_rest": round(passed_s, 1),
            "cpu_share_at_rest": round(spent_s / passed_s, 4),
            "cpu_ms_per_look": round(1000 * spent_s / max(1, looks - seen), 2),
            "rss_mib": round(_memory("VmRSS") / 1024, 1),
            "rss_peak_mib": round(_memory("VmHWM") / 1024, 1),
        }
        for worker in workers:
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await worker
    return result


def _memory(name: str) -> int:
    """KiB, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [one for one in lines if one.startswith(f"{name}:")]
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=SERVICES)
    parser.add_argument("--seconds", type=float, default=LATER_S + 5, help="at rest")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    keeper = context.Process(target=keep_objects, args=(there, arguments.services), daemon=True)
    keeper.start()
    try:
        print(json.dumps(asyncio.run(operate(here.recv(), arguments.services, arguments.seconds))))
    finally:
        keeper.terminate()
        keeper.join()


if __name__ == "__main__":
    main()

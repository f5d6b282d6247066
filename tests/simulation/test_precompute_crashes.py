"""kill -9 of driver, worker and shard at random points of a job, then the job again, until it is done.

Beyond the batches in flight when something died, no chunk is prefilled twice; in the end none is missing and
every one is intact. The prefill is stubbed out, and logs each key before it is put. A failure prints its
seed: `KINTSUGI_SEED=n` runs it again.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

import ray

# A raylet gives its workers 15 otherwise: beside others' work they would hardly ever run.
os.environ.setdefault("RAY_worker_niceness", "0")

from kintsugi.precompute.chunking import ChunkingConfig
from kintsugi.precompute.job import Job
from kintsugi.precompute.ledger import Ledger
from kintsugi.precompute.pool import ensure_ray
from kintsugi.precompute.progress import Progress
from kintsugi.precompute.spec import JobSpec
from kintsugi.store.client.grpc_store import GrpcStore
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.fakes.stub_prefiller import StubPrefiller
from tests.workers import worker_process_ids

pytestmark = [
    pytest.mark.full,
    pytest.mark.simulation,
    pytest.mark.filterwarnings("ignore"),
]

BATCH_TOKENS = 256
WORKERS = 2
IN_FLIGHT_CHUNKS = WORKERS * 2 * BATCH_TOKENS // 20
"""No chunk of this corpus is shorter than 20 tokens."""


def drive(folder: str, store: str) -> None:
    """The driver's life: says how far it is and which processes its workers are."""
    root = Path(folder)
    spec = JobSpec(
        source=str(root / "corpus.jsonl"),
        model=str(make_checkpoint_once("tiny-llama")),
        store=store,
        namespace="acme",
        corpus="tea",
        chunking=ChunkingConfig(64),
        workers=WORKERS,
        batch_tokens=BATCH_TOKENS,
        tokens_per_s_max=6000.0,
    )

    def tell(progress: Progress) -> None:
        ids = worker_process_ids(job._pool) if job._pool is not None and progress.chunks_filled else []
        print(json.dumps({"filled": progress.chunks_filled, "workers": ids}), flush=True)

    factory = partial(StubPrefiller, log=str(root / "prefills.log"))
    job = Job(spec, Ledger(root / "state"), factory=factory, on_progress=tell)
    print(json.dumps({"done": job.run().to_mapping()}), flush=True)


@dataclass
class World:
    """A folder, a shard in a process of its own, and whoever runs the job now."""

    folder: Path
    chance: random.Random
    shard: subprocess.Popen[str] | None = None
    address: str = "127.0.0.1:0"
    ray_address: str = ""
    deaths: list[str] = field(default_factory=list)

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        path = os.pathsep.join(entry for entry in (str(Path.cwd()), *sys.path) if entry)
        environment = {**os.environ, "PYTHONPATH": path, "RAY_ADDRESS": self.ray_address}
        return subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def start_shard(self) -> None:
        self.shard = self.start(
            [
                *(
                    "-c",
                    "from kintsugi.cli.commands.store import app; app()",
                    "serve",
                    "--listen",
                    self.address,
                ),
                *("--data-dir", str(self.folder / "data"), "--ram", "64MiB"),
                *("--ssd", f"{self.folder / 'ssd'}:256MiB"),
            ]
        )
        assert self.shard.stdout is not None
        self.address = self.shard.stdout.readline().split()[-1]

    def life(self, victim: str) -> bool:
        """One driver, with one kill at a random point; whether it came to the end of the job."""
        code = f"from {__name__} import drive; drive({str(self.folder)!r}, 'grpc://{self.address}')"
        driver = self.start(["-c", code])
        assert driver.stdout is not None
        target = self.chance.randrange(1, 25)
        try:
            for line in driver.stdout:
                if not line.startswith("{"):
                    continue  # Ray's own words
                said = json.loads(line)
                if "done" in said:
                    return True
                if victim and said["filled"] >= target and said["workers"]:
                    self.kill(victim, driver, said["workers"])
                    victim = ""
            return False
        finally:
            driver.kill()
            driver.communicate()

    def kill(self, victim: str, driver: subprocess.Popen[str], workers: list[int]) -> None:
        self.deaths.append(victim)
        if victim == "driver":
            driver.send_signal(signal.SIGKILL)
        elif victim == "worker":
            os.kill(self.chance.choice(workers), signal.SIGKILL)
        else:
            assert self.shard is not None
            self.shard.kill()
            self.shard.communicate()
            threading.Timer(self.chance.uniform(0.1, 1.0), self.start_shard).start()

    def settle(self) -> None:
        """Orphaned workers of a driver that was killed finish their batch, and nothing more."""
        log, size = self.folder / "prefills.log", -1
        while log.exists() and size != log.stat().st_size:
            size = log.stat().st_size
            time.sleep(1.0)


def write_corpus(folder: Path) -> None:
    rows = [
        {"id": f"d{n}", "text": f"Document {n} tells of {n * 7} ships and {n * 3} storms. " * 8}
        for n in range(60)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_crashes(folder: Path, seed: int) -> tuple[int, int, int]:
    """(chunks prefilled twice beyond the batches in flight, chunks missing, chunks damaged)."""
    print(f"KINTSUGI_SEED={seed}")
    world = World(folder, random.Random(seed))
    write_corpus(folder)
    # A cluster that outlives its drivers, as in production; and none of them waits for one to start.
    ensure_ray(WORKERS)
    world.ray_address = ray.get_runtime_context().gcs_address
    world.start_shard()
    try:
        victims = ["driver", "worker", "shard"]
        world.chance.shuffle(victims)
        for victim in [*victims, ""]:
            world.life(victim)
            world.settle()
        assert world.life("")
        return judge(world)
    finally:
        if world.shard is not None:
            world.shard.kill()
            world.shard.communicate()


def judge(world: World) -> tuple[int, int, int]:
    prefills = collections.Counter((world.folder / "prefills.log").read_text().split())
    twice = sum(count - 1 for count in prefills.values())
    store = GrpcStore(world.address)
    try:
        ledger = Ledger(world.folder / "state")
        (edition,) = ledger.editions("tea")
        keys = [key for page in ledger.keys(edition.id) for key in page]
        assert {key.hex for key in keys} == set(prefills)
        verified = store.verify("acme", keys)
        allowed = len(world.deaths) * IN_FLIGHT_CHUNKS
        return max(0, twice - allowed), verified.absent, len(verified.quarantined)
    finally:
        store.close()


def test_crashes_of_everything_cost_no_second_prefill(tmp_path: Path) -> None:
    seed = int(os.environ.get("KINTSUGI_SEED", 1))
    assert run_crashes(tmp_path, seed) == (0, 0, 0), f"KINTSUGI_SEED={seed}"


@pytest.mark.parametrize("seed", range(2, 12))
def test_ten_more_seeds(tmp_path: Path, seed: int) -> None:
    assert run_crashes(tmp_path, seed) == (0, 0, 0), f"KINTSUGI_SEED={seed}"

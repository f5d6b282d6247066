"""One job with real vLLM: what it stores is hit by requests."""

from __future__ import annotations

import psutil
import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, Span
from kintsugi.engine.local import LocalEngine, Prompt, save_prompt
from kintsugi.precompute.chunking import Chunker
from kintsugi.precompute.job import Job
from kintsugi.precompute.progress import Progress
from kintsugi.precompute.sources.files import list_source
from kintsugi.precompute.sources.readers import Document, read
from kintsugi.store.client.grpc_store import GrpcStore
from tests.integration.engine.conftest import EngineSlot
from tests.integration.precompute.conftest import Bench, passages, write_corpus

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

ENGINE = {"max_model_len": 4096, "block_size": 32, "kv_cache_memory_bytes": 128 << 20}


@pytest.mark.parametrize("context", [[], pytest.param([*range(40, 90)], marks=pytest.mark.full)])
def test_requests_hit_every_chunk_of_the_corpus(
    bench: Bench, context: list[int], engine_slot: EngineSlot
) -> None:
    pytest.importorskip("vllm")
    engine_slot.close()  # a process has one engine at a time
    write_corpus(bench.source, {f"p{n}": text for n, text in enumerate(passages(8))})
    spec = bench.spec(engine=ENGINE, batch_tokens=2048, context_token_ids=context)
    job = Job(spec, bench.ledger)
    progress = job.run()
    assert (progress.chunks_failed, progress.coverage) == (0, 1.0), progress.failures
    space = job.facts.space
    chunker = Chunker.of_model(spec.model, spec.chunking)
    config = {
        "store": spec.store,
        "prefix_token_ids": list(space.prefix_token_ids),
        "context_token_ids": context,
        "lookup_deadline_ms": 60_000,
        "quality": "off",
    }
    with LocalEngine.start(spec.model, extra_config=config, dtype="bfloat16", **ENGINE) as engine:
        for piece in list_source(spec.source).pieces:
            for document in read(piece, spec.columns):
                assert isinstance(document, Document)
                prompt, spans = list(space.prefix_token_ids), []
                for chunk in list(chunker.chunks(document.text))[:6]:
                    spans.append(Span(len(prompt), len(prompt) + len(chunk.token_ids)))
                    prompt += chunk.token_ids
                params = KintsugiParams("acme", spans=tuple(spans), ratio=0.15)
                (answer,) = engine.generate([Prompt([*prompt, 5, 6, 7], params, max_tokens=1)])
                accounting = answer.accounting or {}
                assert accounting["chunks_missed"] == 0, accounting
                assert accounting["chunks_hit"] == len(spans)
        foreign = save_prompt(space.prefix_token_ids, [3, 4, 5], "acme", ChunkKey(bytes(32)))
        (declined,) = engine.generate([foreign])
        assert (declined.accounting or {})["reason"].startswith("ForeignChunkKey")


@pytest.mark.full
def test_an_engine_of_another_space_ends_the_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    write_corpus(bench.source, {"a": "One sentence. " * 60})
    # The job expects another dtype than its engine, in another process, computes in.
    monkeypatch.setattr("kintsugi.precompute.spec.kv_dtype_of", lambda *arguments: "torch.float16/auto/None")
    with pytest.raises(InvalidField, match="chunk space"):
        Job(bench.spec(engine=ENGINE), bench.ledger).run()
    assert bench.stored() == set()


@pytest.mark.full
def test_an_engine_that_is_killed_while_it_saves_leaves_nothing_half_stored(bench: Bench) -> None:
    pytest.importorskip("vllm")
    write_corpus(bench.source, {f"p{n}": text for n, text in enumerate(passages(12))})
    killed: list[int] = []

    def kill_once(progress: Progress) -> None:
        # The first batch is done, so the second runs: the worker dies amid its saves.
        if progress.chunks_filled and not killed and job._pool is not None and job._pool.in_flight:
            for process in psutil.Process().children(recursive=True):
                # Ray names a process by what it is at. Asked itself, it would answer after its batch.
                if process.name().startswith("ray::Worker"):
                    killed.append(process.pid)
                    process.kill()

    job = Job(bench.spec(engine=ENGINE, batch_tokens=1024), bench.ledger, on_progress=kill_once)
    progress = job.run()
    assert progress.worker_deaths >= 1, progress
    assert (progress.chunks_failed, progress.coverage) == (0, 1.0), progress.failures
    store = GrpcStore(bench.server.address)
    try:
        keys = [key for page in bench.ledger.keys(bench.ledger.editions("tea")[0].id) for key in page]
        verified = store.verify("acme", keys)
    finally:
        store.close()
    assert (verified.absent, list(verified.quarantined)) == (0, [])

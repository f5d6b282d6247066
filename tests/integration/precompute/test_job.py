"""Jobs over real Ray and a real shard; the prefill is stubbed out, so that every one of them is logged."""

from __future__ import annotations

import collections
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField, NotFound, ResourceExhausted, Unavailable
from kintsugi.core.spaces import ChunkKey
from kintsugi.precompute import job as job_module
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.precompute.documents import DocumentRef
from kintsugi.precompute.job import survey
from kintsugi.precompute.ledger import Ledger
from kintsugi.precompute.ledger_chunks import PendingChunk
from kintsugi.precompute.progress import Progress, State
from kintsugi.precompute.warm import forget, pin
from kintsugi.precompute.worker import Prefiller
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.key_file import KeyFile, create_keys, destroy_keys
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.fakes.stub_backend import _zeros
from tests.integration.precompute.conftest import Bench, passages, write_corpus
from tests.integration.precompute.test_retiring import forget_replaced
from tests.workers import worker_process_ids

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = {f"d{n}": f"Document {n} is about tea. " * 20 + f"\n\nIt ends with number {n}." for n in range(12)}


def test_a_corpus_is_filled_once_and_then_found(bench: Bench) -> None:
    texts = passages(30)
    write_corpus(bench.source, {f"p{n}": text for n, text in enumerate(texts)})
    first = bench.run(workers=2)
    assert (first.state, first.documents, first.documents_failed) == (State.DONE, 30, 0)
    assert first.chunks == first.chunks_filled == len(bench.prefilled) == len(set(bench.prefilled))
    assert bench.stored() == set(bench.prefilled)
    assert first.coverage == 1.0
    second = bench.run()
    assert (second.chunks_filled, second.chunks_resident) == (0, first.chunks)
    assert len(bench.prefilled) == first.chunks
    os.utime(bench.source)  # it has to be read again, and says the same
    third = bench.run()
    assert (third.chunks_filled, third.documents_unchanged) == (0, 30)


def test_chunks_after_similar_passages_go_with_these_and_are_prepared_again(bench: Bench) -> None:
    values: dict[str, Any] = {"context_token_ids": [7, 8, 9], "similar_contexts": True}
    texts = {f"p{n}": text for n, text in enumerate(passages(30))}
    write_corpus(bench.source, texts)
    first = bench.run(**values)
    assert first.chunks_filled == first.chunks == len(bench.stored())
    contexts = bench.contexts()
    own = {key: texts for key, texts in contexts.items() if len(texts) > 1}
    assert len(own) > first.chunks / 4, "half of the copies are plain, and few passages resemble none"
    assert bench.run(**values).chunks_filled == 0

    key = next(iter(own))
    named = collections.Counter(text for texts in own.values() for text in texts)
    gone = next(text for text in own[key] if text in contexts)
    assert named[gone]
    erased = next(
        name
        for name in texts
        if any(
            known is not None and known.key.hex == gone
            for known in bench.ledger.resolve("tea", [DocumentRef(name, index) for index in range(9)])
        )
    )
    write_corpus(bench.source, {name: text for name, text in texts.items() if name != erased})
    second = bench.run(**values)
    assert second.chunks_filled >= named[gone], "what was prepared after the document is prepared again"
    assert second.chunks_evicted == 0
    assert not any(gone in texts for texts in bench.contexts().values())
    assert bench.run(**values).chunks_filled == 0


def test_a_corpus_of_an_encrypted_namespace_is_filled_found_and_retired(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_keys(path, "acme")
    values: dict[str, Any] = {
        "store": f"grpc://{bench.server.address}?keys={path}",
        "context_token_ids": [7, 8, 9],
    }
    write_corpus(bench.source, {f"p{n}": text for n, text in enumerate(passages(4))})
    first = bench.run(**values)
    assert first.chunks_filled == first.chunks == len(bench.stored()) == len(set(bench.prefilled))
    assert bench.run(**values).chunks_filled == 0
    with closing(GrpcStore(bench.server.address)) as store:
        assert all(manifest.is_encrypted for manifest in store.list("acme"))
    write_corpus(bench.source, {"p0": passages(1)[0]})
    assert bench.run(**values).chunks_invalidated > 0
    assert 0 < len(bench.stored()) < first.chunks
    held, plain_digest = len(bench.stored()), bench.job(**values).facts.space.plain.digest
    destroy_keys(path, "acme")
    with closing(GrpcStore(bench.server.address, GrpcOptions(keys=KeyFile(path)))) as store:
        forget(bench.ledger, store, bench.ledger.editions("tea"))
        left = [manifest.space_digest for manifest in store.list("acme")]
    assert len(left) == held // 2
    assert set(left) == {plain_digest}, "nobody can name the plain copies any more"


def test_with_a_context_both_copies_are_filled_found_and_deleted(bench: Bench) -> None:
    write_corpus(bench.source, {f"p{n}": text for n, text in enumerate(passages(6))})
    context: dict[str, Any] = {"context_token_ids": [7, 8, 9]}
    single, first = bench.job(**context, plain_copies=False), bench.job(**context)
    alone = single.run()
    assert alone.chunks == alone.chunks_filled == len(bench.stored())
    both = first.run()
    assert (both.chunks, both.chunks_resident, both.chunks_filled) == (
        2 * alone.chunks,
        alone.chunks,
        alone.chunks,
    )
    assert both.bytes_total == 2 * alone.bytes_total, "sizes count both copies"
    store = GrpcStore(bench.server.address)
    space = first.facts.space
    digests = [manifest.space_digest for manifest in store.list("acme", 1000)]
    assert collections.Counter(digests) == {
        space.digest: alone.chunks,
        space.plain.digest: alone.chunks,
    }
    plain = next(one.key for one in store.list("acme", 1000) if one.space_digest == space.plain.digest)
    store.delete("acme", [plain])
    assert bench.run(**context).chunks_filled == 1
    assert plain.hex in bench.stored()
    chunks, pinned = pin(bench.ledger, f"grpc://{bench.server.address}", "tea", 60.0)
    assert (chunks, pinned) == (both.chunks, both.chunks)
    store.close()
    write_corpus(bench.source, {"p0": passages(6)[0]})
    rest = bench.run(**context)
    assert len(bench.stored()) == rest.chunks < both.chunks, "an orphan takes its plain copy with it"


@pytest.mark.parametrize("context", [[], [7, 8, 9]])
def test_discovered_chunks_of_a_corpus_lose_their_lifetime(bench: Bench, context: list[int]) -> None:
    write_corpus(bench.source, {**TEXTS, "other": "Nothing was discovered here. " * 20})
    values: dict[str, Any] = {"context_token_ids": context}
    space = bench.job(**values).facts.space
    chunker = Chunker.of_model(bench.spec().model, ChunkingConfig(64))
    inside, outside = next(iter(chunker.chunks(TEXTS["d0"]))), (5, 6, 7)
    with closing(GrpcStore(bench.server.address)) as store:
        for token_ids in (inside.token_ids, outside):
            for copy in space.copies():
                store.put(*_zeros(copy, token_ids, time.time()), ttl_s=3600.0)
    found, alien = (
        {ChunkKey.of(copy, token_ids) for copy in space.copies()} for token_ids in (inside.token_ids, outside)
    )
    survey(bench.spec(**values))
    assert passing(bench) == found | alien, "a survey changes nothing"
    first = bench.run(**values)
    assert (first.coverage, first.chunks_resident) == (1.0, len(found))
    assert not {key.hex for key in found} & set(bench.prefilled)
    assert passing(bench) == alien


def test_a_chunk_that_leaves_between_the_look_and_the_keeping_is_prefilled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(bench.source, TEXTS)
    first = bench.run()
    leaving, *_ = bench.ledger_keys()
    shard = bench.server.shard

    def evict_then_retain(namespace: str, keys: Sequence[ChunkKey], ttl_s: float) -> list[bool]:
        shard.delete(namespace, [leaving])
        return Shard.retain(shard, namespace, keys, ttl_s)

    monkeypatch.setattr(shard, "retain", evict_then_retain)
    again = bench.run()
    assert (again.chunks_missing, again.chunks_filled) == (1, 1)
    assert again.chunks_resident == first.chunks - 1
    assert bench.prefilled[first.chunks :] == [leaving.hex]


def passing(bench: Bench) -> set[ChunkKey]:
    """The keys of the stored chunks that have a lifetime."""
    entries = {
        key: bench.server.shard.table.get(("acme", key)) for key in map(ChunkKey.from_hex, bench.stored())
    }
    return {key for key, entry in entries.items() if entry is not None and entry.expires_at_s < math.inf}


def test_turning_a_context_on_keeps_what_becomes_a_plain_copy(bench: Bench) -> None:
    write_corpus(bench.source, {f"p{n}": text for n, text in enumerate(passages(4))})
    plain = bench.run()
    prepared = bench.run(context_token_ids=[7, 8, 9])
    assert prepared.chunks_filled == plain.chunks, "the plain copies are there already"
    forget_replaced(bench.ledger, f"grpc://{bench.server.address}")
    assert len(bench.stored()) == 2 * plain.chunks
    assert bench.run(context_token_ids=[7, 8, 9]).chunks_filled == 0


def test_what_is_stored_is_what_a_request_looks_up(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    bench.run()
    spec = bench.spec()
    space = bench.job().facts.space
    chunker = Chunker.of_model(spec.model, ChunkingConfig(64))
    store = GrpcStore(bench.server.address)
    for name, text in TEXTS.items():
        for chunk in chunker.chunks(text):
            assert store.lookup("acme", [chunk.key(space)])[0] is not None
            (known,) = bench.ledger.resolve("tea", [DocumentRef(name, chunk.index)])
            assert known is not None
            assert (known.key, known.token_ids) == (chunk.key(space), chunk.token_ids)
    store.close()


def test_changed_and_vanished_documents_lose_exactly_their_chunks(bench: Bench) -> None:
    shared = "The same closing words. " * 30
    texts = {"a": "Alone in a. " * 30, "b": shared, "c": shared, "d": "Alone in d. " * 30}
    write_corpus(bench.source, texts)
    bench.run()
    before = bench.stored()
    del texts["b"], texts["d"]
    texts["a"] = "Changed in a. " * 30
    write_corpus(bench.source, texts)
    after = bench.run()
    assert after.documents_vanished == 2
    chunker = Chunker.of_model(bench.spec().model, ChunkingConfig(64))
    space = bench.job().facts.space
    expected = {chunk.key(space).hex for text in texts.values() for chunk in chunker.chunks(text)}
    assert bench.stored() == expected
    assert after.chunks_invalidated == len(before - expected) > 0
    assert len(bench.prefilled) == len(set(bench.prefilled))


def test_evicted_chunks_of_an_unchanged_source_come_back(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    bench.run()
    store = GrpcStore(bench.server.address)
    lost = [manifest.key for manifest in store.list("acme", 3)]
    store.delete("acme", lost)
    store.close()
    assert bench.run().chunks_filled == 3
    assert bench.prefilled[-3:] != bench.prefilled[:3] or len(bench.prefilled) > 3


def test_a_bad_document_is_reported_and_the_rest_goes_on(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    with bench.source.open("ab") as file:
        file.write(b'{"id": "e"}\n{broken\n')
    progress = bench.run(errors_share_max=0.5)
    assert (progress.documents, progress.documents_failed) == (12, 2)
    assert {failure.reason[:9] for failure in progress.failures} == {"no column", "is not JS"}
    with pytest.raises(InvalidField, match=r"2 of 14 documents failed, more than 5%.*--errors-share"):
        bench.run()
    assert progress.chunks_filled == len(bench.prefilled)  # nothing lost by the failure, nothing done twice


def test_a_missing_column_and_a_missing_source_fail(bench: Bench) -> None:
    with pytest.raises(NotFound):
        bench.run()
    bench.source.write_text(json.dumps({"body": "x"}))
    with pytest.raises(InvalidField, match=r"there are 'body': choose one \(--columns text=NAME\)"):
        bench.run()


def test_another_model_is_refused_until_it_is_meant_to_replace(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    bench.run()
    old = bench.stored()
    with pytest.raises(InvalidField, match="--replace-model"):
        bench.run(engine={"dtype": "float16"})
    assert bench.run(engine={"dtype": "float16"}, replace_model=True).chunks_filled == len(old)
    assert old < bench.stored()  # the old model still serves
    assert forget_replaced(bench.ledger, bench.spec().store) == len(old)
    assert not old & bench.stored()


def test_a_job_forgets_what_was_replaced_before_it_began(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    bench.run()
    old = bench.stored()
    replacing: dict[str, Any] = {"engine": {"dtype": "float16"}, "replace_model": True, "retire": True}
    assert bench.run(**replacing).chunks_invalidated == 0
    assert old < bench.stored()  # the old model still serves
    assert bench.run(**replacing).chunks_invalidated == len(old)
    assert not old & bench.stored()
    assert len(bench.stored()) == len(old)


def test_pins_cover_the_corpus(bench: Bench) -> None:
    with pytest.raises(NotFound):
        pin(bench.ledger, bench.spec().store, "tea", 60.0)
    write_corpus(bench.source, TEXTS)
    count = bench.run().chunks
    pinned = pin(bench.ledger, bench.spec().store, "tea", 60.0)
    assert pinned == (count, count)


def test_a_survey_says_what_would_be_done_and_changes_nothing(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    planned = survey(bench.spec())
    assert planned.chunks_missing == planned.chunks > 0
    assert planned.bytes_missing > 0
    assert planned.fits
    assert bench.stored() == set()
    assert bench.ledger.editions() == []
    bench.run()
    covered = survey(bench.spec())
    assert covered.coverage == 1.0
    assert covered.tiers == {"ram": planned.chunks}


def test_a_survey_needs_no_ray(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(bench.source, TEXTS)
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    planned = survey(bench.spec())
    assert planned.chunks_missing == planned.chunks > 0


def test_a_folder_as_people_have_it(bench: Bench) -> None:
    folder = bench.folder / "corpus"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git/HEAD").write_text("ref")
    for name in ("README", "retry.py", "notes.rst"):
        (folder / name).write_text(f"All about {name}. " * 40)
    (folder / "logo.png").write_bytes(b"\x89PNG\0")
    (folder / "prices.csv").write_text("article,price\n" + "KB-1,29.00\n" * 50)
    source = str(folder)
    for _ in range(2):  # a second run lists them again
        progress = bench.run(source=source, errors_share_max=0.25)
        assert (progress.documents, progress.documents_failed, progress.files_left_out) == (3, 1, 2)
        assert {Path(file.url).name: file.reason for file in progress.left_out} == {
            "logo.png": "is not text",
            ".git": "is hidden: its name begins with a dot",
        }
    with pytest.raises(InvalidField, match=r"1 of 4 documents failed.*prices\.csv: no column 'text'"):
        bench.run(source=source)
    for name in ("README", "retry.py", "notes.rst", "prices.csv"):
        (folder / name).unlink()
    with pytest.raises(InvalidField, match=r"has no document.*is not text"):
        bench.run(source=source)


def test_a_corpus_beyond_its_bytes_stops_and_keeps_what_it_has(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    with pytest.raises(ResourceExhausted, match="more than the 1000 bytes of the store"):
        bench.run(bytes_max=1000)
    assert bench.run().coverage == 1.0


def test_a_cancelled_job_goes_on_where_it_was(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    job = bench.job(lambda progress: job.cancel() if progress.chunks_filled else None, batch_tokens=128)
    assert job.run().state is State.CANCELLED
    done = len(bench.prefilled)
    rest = bench.run()
    assert 0 < done < len(bench.prefilled) == len(set(bench.prefilled)) == done + rest.chunks_filled


def test_the_rate_limit_holds(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    progress = bench.run(tokens_per_s_max=1500.0, batch_tokens=200)
    assert progress.tokens_filled / progress.fill_s <= 1500.0 * 1.25


def test_a_worker_that_is_killed_is_replaced(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    killed: list[int] = []

    def kill_once(progress: Progress) -> None:
        if progress.chunks_filled and not killed and job._pool is not None:
            killed.extend(worker_process_ids(job._pool))
            for process_id in killed:
                os.kill(process_id, signal.SIGKILL)

    job = bench.job(kill_once, tokens_per_s_max=1500.0, batch_tokens=200)
    progress = job.run()
    assert progress.worker_deaths >= 1
    assert progress.coverage == 1.0
    in_flight = 2 * 200 // 10
    assert len(bench.prefilled) - len(set(bench.prefilled)) <= in_flight


def test_a_store_that_stays_away_ends_the_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "STORE_PATIENCE_S", 0.1)
    write_corpus(bench.source, TEXTS)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        bench.run(store="grpc://127.0.0.1:1")


def test_chunks_that_fail_are_counted_with_their_reason(bench: Bench) -> None:
    write_corpus(bench.source, {"a": "One. " * 100})
    progress = job_module.Job(bench.spec(errors_share_max=1.0), bench.ledger, factory=_refusing_factory).run()
    assert progress.chunks_failed == progress.chunks
    assert collections.Counter(f.reason for f in progress.failures) == {"lora: not here": progress.chunks}
    assert not bench.ledger.editions("tea")[0].completed


def _refusing_factory(spec: object) -> Prefiller:
    class Refusing(Prefiller):
        def fill(self, chunks: Sequence[PendingChunk]) -> list[str]:
            return ["lora: not here"] * len(chunks)

        def close(self) -> None:
            return None

    return Refusing()


def test_a_ledger_that_is_deleted_meanwhile_ends_the_job_and_the_next_one_goes_on(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    gone: list[bool] = []

    def delete_once(progress: Progress) -> None:
        if progress.chunks_filled and not gone:
            gone.append(True)
            shutil.rmtree(bench.ledger.folder)

    with pytest.raises(Unavailable, match=r"ledger\.sqlite was deleted; restart to create it again"):
        bench.job(delete_once, batch_tokens=128).run()
    bench.ledger = Ledger(bench.ledger.folder)
    # A batch that the end of the job interrupts is prefilled again; a chunk that is in the store is not.
    stored = bench.stored()
    prefills = len(bench.prefilled)
    assert bench.run().coverage == 1.0
    assert stored
    assert not stored & set(bench.prefilled[prefills:])


def test_what_cannot_be_listed_is_counted_and_what_it_held_stays(bench: Bench) -> None:
    folder = bench.folder / "corpus"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        (folder / name / "doc.txt").write_text(f"All about {name}. " * 40)
    first = bench.run(source=str(folder))
    os.mkfifo(folder / "pipe.txt")
    shutil.rmtree(folder / "b")
    (folder / "b").symlink_to("nowhere")
    (folder / "b.txt").symlink_to("nowhere")
    second = bench.run(source=str(folder), errors_share_max=1.0)
    assert (second.documents_failed, second.documents_vanished) == (2, 1)
    assert {failure.reason for failure in second.failures} == {
        "is a broken link",
        "is neither a file nor a link to one",
    }
    assert bench.stored() < set(bench.prefilled)
    assert first.chunks == second.chunks + second.chunks_invalidated


def test_a_corpus_on_a_web_server(bench: Bench) -> None:
    pytest.importorskip("aiohttp")
    write_corpus(bench.source, TEXTS)
    handler = partial(SimpleHTTPRequestHandler, directory=str(bench.folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        source = f"http://127.0.0.1:{server.server_port}/{bench.source.name}"
        assert bench.run(source=source).documents == len(TEXTS)
        again = bench.run(source=source)
        assert (again.chunks_filled, again.documents_unchanged) == (0, len(TEXTS))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_engine_that_does_not_start_is_not_tried_for_ever(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    factory = partial(_unable_factory, str(bench.log))
    with pytest.raises(Unavailable, match="no such argument; this was attempt 3"):
        job_module.Job(bench.spec(), bench.ledger, factory=factory).run()
    # Batches in flight when the third one failed may have tried once more.
    assert 3 <= len(bench.prefilled) <= 3 + 2


def _unable_factory(log: str, spec: object) -> Prefiller:
    with open(log, "a", encoding="utf-8") as file:
        file.write("tried\n")
    raise Unavailable("vLLM did not start: no such argument")


def test_a_store_that_evicts_what_was_just_filled_is_found_out(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    with ShardServer(Shard(RamTier(256 << 10)), "127.0.0.1:0") as small:
        url = f"grpc://{small.address}"
        progress = bench.run(store=url, bytes_max=1 << 40)
        kept = survey(bench.spec(store=url))
    assert progress.state is State.DONE
    assert progress.chunks_filled == progress.chunks
    assert 0 < progress.chunks_evicted < progress.chunks
    assert progress.coverage == kept.coverage < 1.0


def test_a_store_without_room_ends_the_job_and_keeps_what_it_has(bench: Bench) -> None:
    write_corpus(bench.source, {"short": "Tea.", "long": "A long tale of tea. " * 60})
    with ShardServer(Shard(RamTier(256 << 10)), "127.0.0.1:0") as small:
        what = {"store": f"grpc://{small.address}", "bytes_max": 1 << 40, "chunking": ChunkingConfig(512)}
        with pytest.raises(ResourceExhausted, match="the store is full"):
            bench.run(**what)
        store = GrpcStore(small.address)
        kept = [manifest.key for manifest in store.list("acme", 100)]
        verified = store.verify("acme", kept)
        store.close()
    assert 0 < len(kept) < len(bench.ledger_keys())
    assert (verified.absent, list(verified.quarantined)) == (0, [])


def test_the_state_of_a_job_lies_in_its_folder(bench: Bench) -> None:
    write_corpus(bench.source, TEXTS)
    bench.run()
    assert {path.suffix for path in Path(bench.ledger.folder).iterdir()} >= {".sqlite", ".lock"}

"""Searches for remains of marked texts after their erasure by chunk, by document and by namespace.

Marked texts are put into a store whose RAM and SSD tier hold a part of them, so that many are evicted, known
to two gateways, named by a ledger and asked about. Then each is erased, and its text, its tokens and what
files keep of both are looked for in every file, in the shard's memory and in the answers of both gateways.
The engine is a stub that stores a chunk's tokens as its KV; vLLM's prefix cache is tested with a real one in
`tests/integration/engine/test_prefix_cache.py`. What the heap of this process still holds is printed, not
judged: nothing claims that it is gone.

Seeded simulations of two and of three gateways, with saves, erasures and shards that restart, count
how often each erasure is made, and what can still be read afterwards.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.support.figures import Figure
from kintsugi.core.errors import NotFound
from kintsugi.sdk.client import Client
from kintsugi.sdk.types import Key
from tests.fakes.marked_service import CORPUS, PHRASE, MarkedService, MarkedText, running
from tests.simulation.erasures import Judgement, simulate

MARKS = 200
MARKS_QUICK = 24
SEEDS = 200
SEEDS_QUICK = 4
QUESTION = "\nQuestion: what do marmots guard?\nAnswer:"
CHUNKS_OF_A_DOCUMENT = 4
CALLS_MAX = 8


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """The figures `erasures_per_erasure` and `erasure_residue`, and how many copies the heap of this process
    still holds."""
    count = MARKS_QUICK if quick else MARKS
    with (
        tempfile.TemporaryDirectory() as name,
        running(Path(name), ram_mib=2, ssd_mib=count // 8 + 1) as service,
    ):
        marks = [service.mark(seed * MARKS + number) for number in range(count)]
        before, answered = _fill(service, marks)
        began_s = time.perf_counter()
        deleted = _erase(service, marks)
        erased_s = time.perf_counter() - began_s
        residue = [*service.find_residue(marks), *_answers(service, marks)]
        heap = sum(1 for _ in _heap_copies())
    seeds = SEEDS_QUICK if quick else SEEDS
    judged = {gateways: _simulate(gateways, seeds) for gateways in (2, 3)}
    residue += [place for some in judged.values() for one in some for place in one.residue]
    lost = sum(len(one.lost) for some in judged.values() for one in some)
    detail = f"{count} texts in {before} places, {answered} answered, {deleted} deletions in {erased_s:.1f} s"
    if residue:
        detail += ": " + "; ".join(residue[:5])
    simulated = ", ".join(
        f"{sum(one.asked for one in some)} erasures at {gateways} gateways"
        for gateways, some in judged.items()
    )
    repeated = max(one.made / one.asked for some in judged.values() for one in some if one.asked)
    return [
        Figure.at_most(
            "erasures_per_erasure",
            repeated,
            1,
            "",
            f"the most of any of {seeds} seeds: {simulated}; {lost} chunks lost that were put later",
        ),
        Figure.at_most("erasure_residue", len(residue), 0, "places", detail),
        Figure.at_most("erasure_heap_copies", heap, None, "copies", "in this process; not judged"),
    ]


def _simulate(gateways: int, seeds: int) -> list[Judgement]:
    judged = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            judged.append(simulate(Path(name), seed, gateways))
    return judged


def _parts(marks: Sequence[MarkedText]) -> tuple[Sequence[MarkedText], ...]:
    """Those erased by chunk, by document and by namespace."""
    third = len(marks) // 3
    return marks[:third], marks[third : 2 * third], marks[2 * third :]


def _fill(service: MarkedService, marks: Sequence[MarkedText]) -> tuple[int, int]:
    """Put every text and ask about it. Returns the places that hold some of it, and the number of answers
    with a hit."""
    chunks, documents, namespace = _parts(marks)
    hits = 0
    with (
        service.client("docs") as mine,
        service.client("docs", 1) as theirs,
        service.client("tenant") as other,
    ):
        for client, asked, some in (
            (mine, theirs, chunks),
            (mine, theirs, documents),
            (other, other, namespace),
        ):
            for start in range(0, len(some), CHUNKS_OF_A_DOCUMENT):
                texts = [mark.text for mark in some[start : start + CHUNKS_OF_A_DOCUMENT]]
                client.put_chunks(texts)
                hits += asked.generate(texts, QUESTION).accounting["chunks_hit"] > 0
        service.record("docs", dict(_documents(documents)))
        service.record("tenant", dict(_documents(namespace)))
    return len(service.find_residue(marks)), hits


def _documents(marks: Sequence[MarkedText]) -> Iterator[tuple[str, Sequence[MarkedText]]]:
    for start in range(0, len(marks), CHUNKS_OF_A_DOCUMENT):
        yield f"document-{start}", marks[start : start + CHUNKS_OF_A_DOCUMENT]


def _erase(service: MarkedService, marks: Sequence[MarkedText]) -> int:
    """Erase everything. Returns the number of calls that found something."""
    chunks, documents, _ = _parts(marks)
    with (
        service.client("docs") as mine,
        service.client("tenant") as other,
        ThreadPoolExecutor(CALLS_MAX) as threads,
    ):
        keys = [text.key for text in mine.tokenize([mark.text for mark in chunks])]
        deleted = sum(threads.map(mine.delete_chunk, keys))
        names = [name for name, _ in _documents(documents)]
        receipts = list(threads.map(lambda name: mine.delete_document(f"{CORPUS}-docs", name), names))
        receipts.append(other.erase_namespace())
        time.sleep(max(0.0, max(receipt.gone_at_s for receipt in receipts) - time.time()))
    return deleted + sum(receipt.deleted for receipt in receipts)


def _answers(service: MarkedService, marks: Sequence[MarkedText]) -> list[str]:
    """Number of answers that still use an erased text."""
    texts = [mark.text for mark in marks]
    found = []
    for number, one in enumerate(service.gateways):
        for namespace in ("docs", "tenant"):
            with service.client(namespace, number) as client:
                found += [f"{namespace} lists {chunk.key} at {number}" for chunk in client.list_chunks()]
                for text in client.tokenize(texts):
                    if client.get_chunk(text.key) is not None or _is_known(client, text.key):
                        found.append(f"{namespace} knows {text.key} at {number}")
            if one.gateway.known.find(namespace, "\n".join(texts)):
                found.append(f"texts are found in messages to {namespace} at {number}")
    return found


def _is_known(client: Client, key: str) -> bool:
    """Whether a prompt may name the chunk by its key."""
    try:
        client.generate([Key(key)], QUESTION, max_tokens=1)
    except NotFound:
        return False
    return True


def _heap_copies() -> Iterator[int]:
    """Addresses in this process's private memory where the phrase stands."""
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p", line)
            if match is None:
                continue
            start, end = int(match[1], 16), int(match[2], 16)
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except (OSError, OverflowError):
                continue
            for found in re.finditer(re.escape(PHRASE.encode()), data or b""):
                yield start + found.start()

"""The ledger: documents to chunks, and which chunks nobody has any more."""

from __future__ import annotations

import re
import sqlite3
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

from kintsugi.core.errors import Corrupted, InvalidField, NotFound, Unavailable
from kintsugi.core.layout import TOKENS_MAX
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, token_bytes
from kintsugi.precompute import ledger as ledger_module
from kintsugi.precompute.documents import DocumentRef
from kintsugi.precompute.ledger import Ledger, ScannedChunk, ScannedDocument
from kintsugi.precompute.ledger_chunks import pack_tokens
from kintsugi.precompute.sources.readers import Failure
from kintsugi.precompute.warm import pin

SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "acme")
OTHER = ChunkSpace(ModelFingerprint(bytes([1]) * 32), "acme")


def document(
    name: str, *words: int, url: str = "a.jsonl", place: int = 0, space: ChunkSpace = SPACE
) -> ScannedDocument:
    chunks = tuple(
        ScannedChunk(ChunkKey.of(space, [word]).digest, pack_tokens(token_bytes([word])), 1) for word in words
    )
    return ScannedDocument(url, place, name, "", repr(words).encode(), len(words), chunks)


def key(word: int, space: ChunkSpace = SPACE) -> ChunkKey:
    return ChunkKey.of(space, [word])


class LookedOnly(Exception):
    """Raised so that nothing is forgotten."""


def orphans(ledger: Ledger, namespace: str, name_key: bytes = b"") -> list[ChunkKey]:
    found: list[ChunkKey] = []
    with suppress(LookedOnly), ledger.orphans(namespace, name_key) as keys:
        found = keys
        raise LookedOnly
    return found


class Corpus:
    """One corpus of a ledger, run by run."""

    def __init__(self, ledger: Ledger, name: str = "tea", space: ChunkSpace = SPACE) -> None:
        self.ledger, self.name, self.space = ledger, name, space

    def run(
        self, *documents: ScannedDocument, stamps: dict[str, str] | None = None, failed: tuple[str, ...] = ()
    ) -> tuple[list[ChunkKey], list[Failure], int]:
        """Chunks to be looked up, duplicates, vanished documents."""
        edition = self.ledger.open_edition(self.name, self.space, "src", "model", "cut")
        run = self.ledger.begin_run(edition)
        name_key = self.space.name_key
        recorded = self.ledger.record(edition, run, "acme", documents, name_key)
        vanished = self.ledger.end_scan(edition, run, stamps or {}, failed)
        rest = [chunk.key for page in self.ledger.claim_unchecked(edition, run, name_key) for chunk in page]
        self.ledger.end_run(run, 0, 0.0, complete=True)
        return [chunk.key for chunk in recorded.fresh] + rest, recorded.duplicates, vanished


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def test_a_chunk_is_looked_up_once_per_run(ledger: Ledger) -> None:
    corpus = Corpus(ledger)
    first, _, _ = corpus.run(document("a", 1, 2, 1), document("b", 2, 3))
    assert first == [key(1), key(2), key(3)]
    again, _, _ = corpus.run(document("a", 1, 2, 1), document("b", 2, 3))
    assert again == first
    (edition,) = ledger.editions("tea")
    assert (edition.documents, edition.chunks, edition.completed) == (2, 3, True)
    assert [k for page in ledger.keys(edition.id) for k in page] == sorted(first)


def test_a_change_orphans_exactly_the_chunks_that_nobody_else_has(ledger: Ledger) -> None:
    corpus, other = Corpus(ledger), Corpus(ledger, "coffee")
    corpus.run(document("a", 1, 2, 3, 4), document("b", 2))
    other.run(document("x", 3))
    fresh, _, _ = corpus.run(document("a", 4, 5), document("b", 2))
    assert set(fresh) == {key(4), key(5), key(2)}
    assert orphans(ledger, "acme") == [key(1)]
    assert orphans(ledger, "umbrella") == []
    with ledger.orphans("acme"):
        pass
    assert orphans(ledger, "acme") == []


def test_a_document_that_vanished_is_forgotten_unless_its_file_could_not_be_read(ledger: Ledger) -> None:
    corpus = Corpus(ledger)
    corpus.run(document("a", 1), document("b", 2, url="b.jsonl"))
    assert corpus.run(document("a", 1), failed=("b.jsonl",))[2] == 0
    assert orphans(ledger, "acme") == []
    assert corpus.run(document("a", 1))[2] == 1
    assert orphans(ledger, "acme") == [key(2)]


def test_files_that_have_not_changed_keep_their_documents(ledger: Ledger) -> None:
    corpus = Corpus(ledger)
    corpus.run(document("a", 1), document("b", 2, url="b.jsonl"), stamps={"a.jsonl": "1", "b.jsonl": ""})
    edition = ledger.open_edition("tea", SPACE, "src", "model", "cut")
    assert ledger.stamps(edition) == {"a.jsonl": "1"}
    run = ledger.begin_run(edition)
    assert ledger.keep_files(edition, run, ["a.jsonl"]) == 1
    assert ledger.end_scan(edition, run, {}, []) == 1
    assert [chunk.key for page in ledger.claim_unchecked(edition, run) for chunk in page] == [key(1)]
    recut = ledger.open_edition("tea", SPACE, "src", "model", "cut otherwise")
    assert (recut, ledger.stamps(recut)) == (edition, {})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_documents_with_one_id_the_first_of_the_source_stays(
    ledger: Ledger, order: tuple[int, int]
) -> None:
    both = (document("a", 1, place=0), document("a", 2, place=9))
    _, duplicates, _ = Corpus(ledger).run(*(both[index] for index in order))
    assert [(failure.place, failure.document_id) for failure in duplicates] == [(9, "a")]
    (found,) = ledger.resolve("tea", [DocumentRef("a", 0)])
    assert found is not None
    assert found.key == key(1)


def test_a_block_that_is_delivered_twice_counts_once(ledger: Ledger) -> None:
    _, duplicates, _ = Corpus(ledger).run(document("a", 1), document("a", 1))
    assert duplicates == []


def test_references_resolve_within_the_edition_that_serves(ledger: Ledger) -> None:
    with pytest.raises(NotFound, match="kintsugi precompute"):
        ledger.resolve("tea", [DocumentRef("a", 0)])
    Corpus(ledger).run(document("a", 7, 8))
    known = ledger.resolve(
        "tea", [DocumentRef("a", 1), DocumentRef("a", 2), DocumentRef("b", 0), DocumentRef("a", 0, "x")]
    )
    assert known[1:] == [None, None, None]
    assert known[0] is not None
    assert (known[0].key, known[0].token_ids) == (key(8), (8,))
    edition = ledger.open_edition("tea", OTHER, "src", "model2", "cut")
    ledger.begin_run(edition)  # a second model is being filled: the first one serves on
    (still,) = ledger.resolve("tea", [DocumentRef("a", 1)])
    assert still is not None
    assert still.key == key(8)


@pytest.mark.parametrize("occurrence", range(2))
def test_a_flipped_bit_of_a_name_stands_for_no_other_document(tmp_path: Path, occurrence: int) -> None:
    """The name stands in the document's row and in an index; SQLite has no checksum over either."""
    with closing(Ledger(tmp_path)) as ledger:
        Corpus(ledger).run(document("name-1", 7), document("name-5", 8))
    file = tmp_path / "ledger.sqlite"
    data = file.read_bytes()
    places = [found.start() for found in re.finditer(b"name-1", data)]
    assert len(places) == 2
    place = places[occurrence]
    file.write_bytes(data[:place] + b"name-3" + data[place + 6 :])
    with closing(Ledger(tmp_path)) as ledger:
        refs = [DocumentRef(f"name-{number}", 0) for number in (1, 3, 5)]
        found = ledger.resolve("tea", refs)
        assert [known and known.token_ids for known in found] == [None, None, (8,)]


@pytest.mark.parametrize("damage", ["tokens", "key"])
def test_a_chunk_whose_key_and_tokens_disagree_is_not_found(tmp_path: Path, damage: str) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        Corpus(ledger).run(document("a", 7), document("b", 8))
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database, database:
        other = pack_tokens(token_bytes([9])) if damage == "tokens" else key(9).digest
        database.execute(f"UPDATE chunk SET {damage}=? WHERE key=?", (other, key(7).digest))
        if damage == "key":
            database.execute("UPDATE span SET key=? WHERE key=?", (other, key(7).digest))
    with closing(Ledger(tmp_path)) as ledger:
        found = ledger.resolve("tea", [DocumentRef("a", 0), DocumentRef("b", 0)])
        assert [known and known.token_ids for known in found] == [None, (8,)]


def test_an_emptied_edition_leaves_its_own_chunks_as_orphans(ledger: Ledger) -> None:
    Corpus(ledger).run(document("a", 1))
    Corpus(ledger, space=OTHER).run(document("a", 1, space=OTHER))
    old, _ = ledger.editions("tea")
    ledger.empty(old.id)
    assert orphans(ledger, "acme") == [key(1)]
    assert [edition.completed for edition in ledger.editions("tea")] == [False, True]
    ledger.retire(old.id)
    assert orphans(ledger, "acme") == [key(1)]
    assert [edition.fingerprint for edition in ledger.editions("tea")] == [OTHER.fingerprint.hex]


def test_what_was_complete_last_is_not_replaced_yet(ledger: Ledger) -> None:
    """Engines may still serve the model before this one."""
    spaces = [ChunkSpace(ModelFingerprint(bytes([n]) * 32), "acme") for n in range(3)]

    def opened(space: ChunkSpace) -> int:
        return ledger.open_edition("tea", space, "src", "model", "cut")

    def filled(space: ChunkSpace) -> None:
        ledger.end_run(ledger.begin_run(opened(space)), 1, 1.0, complete=True)

    def replaced(edition: int) -> list[int]:
        return [one.id for one in ledger.find_replaced_editions("tea", edition)]

    first, second, third = (opened(space) for space in spaces)
    assert replaced(third) == []
    filled(spaces[0])
    assert replaced(second) == [third]
    filled(spaces[1])
    assert replaced(third) == [first]
    assert replaced(second) == [first, third]
    # Back to the first model: the second is the one that may still be served.
    assert replaced(first) == [third]
    filled(spaces[0])
    assert replaced(first) == [second, third]


def test_two_jobs_on_one_corpus_are_refused(ledger: Ledger, tmp_path: Path) -> None:
    with (
        ledger.exclusive("tea"),
        ledger.exclusive("coffee"),
        pytest.raises(Unavailable, match="another job"),
        Ledger(tmp_path).exclusive("tea"),
    ):
        pass
    with ledger.exclusive("tea"):
        pass


def test_everything_outlives_the_process(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
    Corpus(first).run(document("a", 1))
    first.close()
    assert Ledger(tmp_path).resolve("tea", [DocumentRef("a", 0)])[0] is not None


def test_the_newest_long_run_predicts(ledger: Ledger) -> None:
    edition = ledger.open_edition("tea", SPACE, "src", "model", "cut")
    assert ledger.tokens_per_s(SPACE.fingerprint.hex) is None
    for tokens, seconds in ((1000, 10.0), (5, 0.1)):
        ledger.end_run(ledger.begin_run(edition, workers=2), tokens, seconds, complete=False)
    assert ledger.tokens_per_s(SPACE.fingerprint.hex) == 50.0


def test_a_state_folder_that_is_none_is_explained(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 200)
    with pytest.raises(Corrupted, match="--state"):
        Ledger(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="--state"):
        Ledger(tmp_path / "file")


def test_a_store_without_pins_cannot_keep_a_corpus(ledger: Ledger) -> None:
    Corpus(ledger).run(document("a", 1, 2))
    with pytest.raises(InvalidField, match="has no pins"):
        pin(ledger, "ram://ledger-test", "tea", 60.0)


def test_documents_below_a_folder_that_could_not_be_listed_stay(ledger: Ledger) -> None:
    corpus = Corpus(ledger)
    names = ("src/deep/a", "src/deep/b/c", "src/deeper/d", "src/e")
    corpus.run(*(document(url, number, url=url) for number, url in enumerate(names)))
    _, _, vanished = corpus.run(document("src/e", 3, url="src/e"), failed=("src/deep/",))
    assert vanished == 1
    assert orphans(ledger, "acme") == [key(2)]


def test_a_document_cannot_take_up_an_orphan_while_it_is_deleted(tmp_path: Path) -> None:
    """Two jobs share a ledger: one deletes what no document has, the other records a document that has it."""
    ledger, other = Ledger(tmp_path), Ledger(tmp_path)
    Corpus(ledger).run(document("a", 1))
    Corpus(ledger).run(document("a", 2))
    seen: list[ChunkKey] = []

    def record() -> None:
        fresh, _, _ = Corpus(other, "coffee").run(document("b", 1))
        seen.extend(fresh)

    with ledger.orphans("acme") as keys:
        assert keys == [key(1)]
        thread = threading.Thread(target=record)
        thread.start()
        thread.join(0.3)
        assert seen == [], "it waits until the store has lost the chunk"
    thread.join(30)
    assert seen == [key(1)], "and then asks for it anew"
    assert orphans(ledger, "acme") == []
    assert other.resolve("coffee", [DocumentRef("b", 0)])[0] is not None


PREPARED = ChunkSpace(ModelFingerprint(bytes(32)), "acme", context_token_ids=(8, 9))
OTHER_CONTEXT = ChunkSpace(ModelFingerprint(bytes(32)), "acme", context_token_ids=(9,))


def prepared(*words: int, space: ChunkSpace = PREPARED) -> list[ChunkKey]:
    return [key(word, copy) for word in words for copy in (space, SPACE)]


def test_with_a_context_both_copies_are_looked_up(ledger: Ledger) -> None:
    corpus = Corpus(ledger, space=PREPARED)
    fresh, _, _ = corpus.run(document("a", 1, 2, space=PREPARED))
    assert fresh == prepared(1, 2)
    again, _, _ = corpus.run(stamps={"a.jsonl": "s"}, failed=("a.jsonl",))
    assert again == prepared(1, 2), "also of documents that were not read again"
    (edition,) = ledger.editions("tea")
    assert {one for page in ledger.keys(edition.id) for one in page} == set(prepared(1, 2))
    assert edition.chunks == 2


def test_plain_copies_of_an_encrypted_namespace_are_named_with_its_key(ledger: Ledger) -> None:
    space = replace(PREPARED, name_key=bytes(range(32)))
    corpus = Corpus(ledger, space=space)
    keys = [key(word, copy) for word in (1, 2) for copy in (space, space.plain)]
    assert not set(keys) & set(prepared(1, 2))
    assert corpus.run(document("a", 1, 2, space=space))[0] == keys
    assert corpus.run(stamps={"a.jsonl": "s"}, failed=("a.jsonl",))[0] == keys
    (edition,) = ledger.editions("tea")
    assert {one for page in ledger.keys(edition.id, space.name_key) for one in page} == set(keys)
    (known,) = ledger.resolve("tea", [DocumentRef("a", 0)], lambda namespace: space.name_key)
    assert known is not None
    assert known.key == keys[0]
    assert ledger.resolve("tea", [DocumentRef("a", 0)]) == [None], "without its name key nothing is verified"
    corpus.run(document("a", 2, space=space))
    assert orphans(ledger, "acme", space.name_key) == keys[:2]
    files = [path.read_bytes() for path in ledger.folder.iterdir()]
    assert not any(space.name_key in data for data in files), "the ledger does not keep it"


def test_a_document_of_an_encrypted_namespace_is_erased_with_its_plain_copies(ledger: Ledger) -> None:
    space = replace(PREPARED, name_key=bytes(range(32)))
    Corpus(ledger, space=space).run(document("a", 1, space=space))
    erased: list[ChunkKey] = []
    assert ledger.erase_document("acme", "tea", "a", erased.extend, space.name_key)
    assert erased == [key(1, space), key(1, space.plain)]


def test_a_namespace_is_erased_with_its_parts(ledger: Ledger) -> None:
    part = replace(SPACE, namespace="acme/-/tenant")
    for name, space in (("tea", SPACE), ("tea", part)):
        Corpus(ledger, name, space).run(document("a", 1, space=space))
    assert ledger.erase_namespace("acme/-/other") == 0
    assert ledger.erase_namespace("acme") == 2
    assert ledger.editions("tea") == []


def test_plain_copies_follow_the_newest_job(ledger: Ledger) -> None:
    corpus = Corpus(ledger, space=PREPARED)
    corpus.run(document("a", 1, space=PREPARED))
    edition = ledger.open_edition("tea", PREPARED, "src", "model", "cut", plain_copies=False)
    assert [one for page in ledger.keys(edition) for one in page] == [key(1, PREPARED)]


def test_an_orphan_takes_its_plain_copy_with_it(ledger: Ledger) -> None:
    corpus = Corpus(ledger, space=PREPARED)
    corpus.run(document("a", 1, 2, space=PREPARED))
    corpus.run(document("a", 2, space=PREPARED))
    assert orphans(ledger, "acme") == prepared(1)


def test_a_plain_copy_that_another_edition_needs_stays(ledger: Ledger) -> None:
    plain, first = Corpus(ledger, "tea", SPACE), Corpus(ledger, "tea", PREPARED)
    second = Corpus(ledger, "tea", OTHER_CONTEXT)
    for corpus in (plain, first, second):
        corpus.run(document("a", 1, space=corpus.space))
    editions = ledger.editions("tea")
    for edition, deleted in zip(
        editions, ([], [key(1, PREPARED)], prepared(1, space=OTHER_CONTEXT)), strict=True
    ):
        ledger.empty(edition.id)
        with ledger.orphans("acme") as found:
            assert found == deleted
        ledger.retire(edition.id)


def test_orphans_that_are_all_in_use_as_plain_copies_do_not_hide_others(ledger: Ledger) -> None:
    words = range(ledger_module.PAGE + 1)
    plain, first = Corpus(ledger, "tea", SPACE), Corpus(ledger, "tea", PREPARED)
    plain.run(document("a", *words), document("b", 9999, place=1))
    first.run(document("a", *words, space=PREPARED))
    ledger.empty(ledger.editions("tea")[0].id)
    with ledger.orphans("acme") as found:
        assert found == [key(9999)]
    with ledger.orphans("acme") as found:
        assert found == []


def damage(ledger: Ledger, table: str, column: str, value: object) -> None:
    """Puts a value into a column of every row, as another program or a flipped bit may."""
    with closing(sqlite3.connect(ledger.folder / "ledger.sqlite")) as database, database:
        database.execute(f"UPDATE {table} SET {column}=?", (value,))


TOKENS_BOMB = pack_tokens(bytes(4 * (TOKENS_MAX + 1)))
NOT_TOKENS = [b"", b"no zlib", pack_tokens(b"abc"), pack_tokens(bytes(64))[:-3], "text", 7, TOKENS_BOMB]


@pytest.mark.parametrize("value", NOT_TOKENS, ids=lambda value: repr(value)[:12])
def test_damaged_tokens_are_a_miss_and_no_copy_is_passed_over(ledger: Ledger, value: object) -> None:
    space = replace(SPACE, context_token_ids=(9,))
    Corpus(ledger, space=space).run(document("a", 1, space=space))
    damage(ledger, "chunk", "tokens", value)
    assert ledger.resolve("tea", [DocumentRef("a", 0)]) == [None]
    assert ledger.chunks(SPACE.fingerprint.hex, 0, 10) == []
    with pytest.raises(Corrupted, match=r"remove ledger\.sqlite"):
        list(ledger.keys(1))
    ledger.empty(1)
    with pytest.raises(Corrupted, match=r"remove ledger\.sqlite"):
        orphans(ledger, "acme")


def test_sound_chunks_are_given_out_beside_damaged_ones(ledger: Ledger) -> None:
    Corpus(ledger).run(document("a", 1, 2, 3))
    with closing(sqlite3.connect(ledger.folder / "ledger.sqlite")) as database, database:
        database.execute("UPDATE chunk SET tokens=? WHERE id IN (1, 2)", (b"no zlib",))
    (chunk,) = ledger.chunks(SPACE.fingerprint.hex, 0, 1)
    assert (chunk.number, chunk.token_ids) == (3, (3,))


@pytest.mark.parametrize("value", [b"short", "text" * 8, 5_000_000_000])
def test_a_damaged_digest_is_no_other_space(ledger: Ledger, value: object) -> None:
    space = replace(SPACE, context_token_ids=(9,))
    Corpus(ledger, space=space).run(document("a", 1, space=space))
    damage(ledger, "prepared_space", "plain", value)
    with pytest.raises(Corrupted, match="digest"):
        list(ledger.keys(1))
    damage(ledger, "edition", "space", value)
    assert ledger.resolve("tea", [DocumentRef("a", 0)]) == [None]
    damage(ledger, "chunk", "key", value)
    assert ledger.chunks(SPACE.fingerprint.hex, 0, 10) == []

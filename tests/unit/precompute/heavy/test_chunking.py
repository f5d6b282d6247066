"""Documents into chunks, and the adapters that hand their keys on."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("semantic_text_splitter", reason="install the extra `chunking`")

from kintsugi.core.errors import Corrupted, InvalidField, NotFound
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint
from kintsugi.models.passages import read_bundled_passages
from kintsugi.precompute.chunking import SECTION_CHARS, Chunker, ChunkingConfig
from tests.fakes.kinds_of_text import KINDS
from tests.fakes.random_models.factory import make_checkpoint_once

SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "acme", (0,))
TEXT = "\n\n".join(passage.text for passage in read_bundled_passages())


@pytest.fixture(scope="module")
def folder() -> Path:
    return make_checkpoint_once("tiny-llama")


def chunker(folder: Path, **config: int) -> Chunker:
    return Chunker.of_model(folder, ChunkingConfig(**config))


@pytest.mark.parametrize(("tokens_max", "overlap"), [(40, 0), (200, 0), (200, 50), (5000, 0)])
def test_chunks_are_exact_pieces_of_the_document_within_their_bound(
    folder: Path, tokens_max: int, overlap: int
) -> None:
    cut = chunker(folder, tokens_max=tokens_max, overlap_tokens=overlap)
    chunks = list(cut.chunks(TEXT))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        assert TEXT[chunk.start : chunk.end] == chunk.text
        assert chunk.token_ids == cut.token_ids(chunk.text)
        assert 0 < len(chunk.token_ids) <= tokens_max
    covered = {position for chunk in chunks for position in range(chunk.start, chunk.end)}
    assert len(covered) == len(TEXT)
    overlapping = any(one.end > other.start for one, other in pairwise(chunks))
    assert overlapping == (overlap > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens_max", [1, 16, 512])
def test_chunks_joined_are_the_document(folder: Path, kind: str, tokens_max: int) -> None:
    cut = chunker(folder, tokens_max=tokens_max)
    text = KINDS[kind](random.Random(5))[:4_000]
    for markdown in (False, True):
        chunks = list(cut.chunks(text, markdown))
        assert "".join(chunk.text for chunk in chunks) == text
        for chunk in chunks:
            assert chunk.text == text[chunk.start : chunk.end]
            assert chunk.token_ids == cut.token_ids(chunk.text)
            assert len(chunk.token_ids) <= tokens_max or len(chunk.text) == 1


@pytest.mark.parametrize(
    ("kind", "is_start"),
    [
        ("table", lambda text: text.startswith("| ")),
        ("csv", lambda text: text[0].isalpha()),
        ("code", lambda text: text.startswith(("class", "    "))),
        ("long line", lambda text: text[0].isalpha() or text[0] == " " != text[1]),
    ],
)
def test_a_chunk_keeps_its_line_end_and_its_indentation(
    folder: Path, kind: str, is_start: Callable[[str], bool]
) -> None:
    chunks = list(chunker(folder, tokens_max=256).chunks(KINDS[kind](random.Random(6))))
    assert len(chunks) > 3
    for chunk in chunks:
        assert is_start(chunk.text)
    for chunk in chunks[:-1]:
        assert chunk.text.endswith("\n") == (kind != "long line")


def test_a_document_of_white_space_is_cut_too(folder: Path) -> None:
    cut = chunker(folder, tokens_max=16)
    for text in (" \n\t", "\n" * 500, " " * 3_000, "a" + "\r\n" * 300 + "b"):
        chunks = list(cut.chunks(text))
        assert "".join(chunk.text for chunk in chunks) == text
        assert max(len(chunk.token_ids) for chunk in chunks) <= 16
    assert list(cut.chunks("")) == []


def test_a_request_that_tokenises_a_chunk_alone_finds_it(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for chunk in chunker(folder, tokens_max=100).chunks(TEXT):
        assert chunk.token_ids == tuple(tokenizer(chunk.text, add_special_tokens=False).input_ids)


def test_keys_are_the_same_in_another_process(folder: Path) -> None:
    code = (
        "import sys, random; from tests.unit.precompute.heavy.test_chunking import *; "
        "print([chunk.key(SPACE).hex for chunk in chunker(sys.argv[1], tokens_max=100).chunks(TEXT)])"
    )
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4])
    keys = [chunk.key(SPACE).hex for chunk in chunker(folder, tokens_max=100).chunks(TEXT)]
    assert said.stdout.strip() == str(keys)


def test_golden_key(folder: Path) -> None:
    """Fails where a new splitter or tokenizer would orphan stored corpora."""
    chunks = list(chunker(folder, tokens_max=64).chunks("One sentence. Another one! " * 40))
    assert (len(chunks), chunks[0].key(SPACE).hex[:32]) == (10, "d7af08c4b74a73b005250a8e978f2f67")


def test_sentences_stay_whole_where_they_fit(folder: Path) -> None:
    sentences = [f"Sentence number {index} is about salt." for index in range(60)]
    for chunk in chunker(folder, tokens_max=80).chunks(" ".join(sentences)):
        assert chunk.text.endswith(".")
        assert chunk.text.lstrip().startswith("Sentence")


def test_markdown_is_cut_at_its_headings(folder: Path) -> None:
    text = "".join(f"# Part {index}\n\nText of part {index} that goes on.\n\n" for index in range(6))
    chunks = list(chunker(folder, tokens_max=60).chunks(text, markdown=True))
    assert len(chunks) > 1
    assert all(chunk.text.startswith("# Part") for chunk in chunks)


def test_any_text_is_cut_in_bounded_time(folder: Path) -> None:
    noise = "".join(random.Random(3).choices("abcé漢🎉\u0301", k=3 * SECTION_CHARS))
    cut = chunker(folder, tokens_max=256)
    assert "".join(chunk.text for chunk in cut.chunks(noise)) == noise
    assert "".join(chunk.text for chunk in cut.chunks("x" * 100_000)) == "x" * 100_000


def test_identity_names_all_that_decides_the_cuts() -> None:
    one, other = ChunkingConfig(100, 10), ChunkingConfig(100, 11)
    assert one.identity != other.identity
    assert "semantic-text-splitter" in json.loads(one.identity)["splitter"]


@pytest.mark.parametrize(
    ("config", "field"),
    [({"tokens_max": 0}, "tokens_max"), ({"tokens_max": 8, "overlap_tokens": 8}, "overlap_tokens")],
)
def test_impossible_sizes_are_refused(config: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidField, match=field):
        ChunkingConfig(**config)


def test_a_folder_without_a_tokenizer_says_what_to_save(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="save_pretrained"):
        Chunker.of_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(Corrupted, match=r"tokenizer\.json"):
        Chunker.of_model(tmp_path)


def test_langchain_chunks_carry_the_keys(folder: Path) -> None:
    pytest.importorskip("langchain_text_splitters")
    from langchain_core.documents import Document

    from kintsugi.sdk.langchain import KintsugiTextSplitter

    cut = chunker(folder, tokens_max=100)
    splitter = KintsugiTextSplitter(cut, SPACE)
    found = splitter.split_documents([Document(page_content=TEXT, metadata={"source": "tea"})])
    expected = list(cut.chunks(TEXT))
    assert [document.page_content for document in found] == [chunk.text for chunk in expected]
    assert splitter.split_text(TEXT) == [chunk.text for chunk in expected]
    for document, chunk in zip(found, expected, strict=True):
        assert document.metadata["kintsugi_key"] == chunk.key(SPACE).hex
        assert document.metadata["source"] == "tea"
        assert document.metadata["start_index"] == chunk.start


@pytest.mark.filterwarnings("ignore")
def test_llama_index_nodes_carry_the_keys_and_do_not_show_them_to_the_model(folder: Path) -> None:
    pytest.importorskip("llama_index.core")
    from llama_index.core.schema import Document, MetadataMode

    from kintsugi.sdk.llama_index import KintsugiNodeParser

    cut = chunker(folder, tokens_max=100)
    nodes = KintsugiNodeParser(cut, SPACE).get_nodes_from_documents([Document(text=TEXT, doc_id="tea")])
    expected = list(cut.chunks(TEXT))
    assert len(nodes) == len(expected)
    for node, chunk in zip(nodes, expected, strict=True):
        assert node.metadata["kintsugi_key"] == chunk.key(SPACE).hex
        assert node.get_content(MetadataMode.LLM) == chunk.text
        assert node.ref_doc_id == "tea"
        assert TEXT[node.start_char_idx : node.end_char_idx] == chunk.text


@pytest.mark.filterwarnings("ignore")
def test_llama_index_pastes_nodes_as_they_are(folder: Path) -> None:
    pytest.importorskip("llama_index.core")
    from llama_index.core.prompts import PromptTemplate

    from kintsugi.sdk.llama_index import KintsugiPromptHelper

    pieces = [chunk.text for chunk in chunker(folder, tokens_max=40).chunks("  def f():\n    return 1\n" * 9)]
    template = PromptTemplate("{context_str}")
    helper = KintsugiPromptHelper(context_window=4_000)
    assert helper.repack(template, pieces) == ["\n\n".join(pieces)]
    packed = KintsugiPromptHelper(context_window=320, num_output=256).repack(template, pieces)
    assert len(packed) > 1

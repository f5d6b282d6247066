"""The documented recipe writes the prompt that calibration measures."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("semantic_text_splitter", reason="install the extra `chunking`")

from kintsugi.core.plan import FormName, PromptChunk
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.segments import Segment, SegmentResolver
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.models.prompt_form import PromptForm, load_form
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.sdk.types import Plain

ROOT = Path(__file__).parents[4]
TABLE = "| article | price |\n|---|---|\n" + "".join(f"| KB-{n} | {n}.00 EUR |\n" for n in range(90))
CODE = "".join(
    f"def attempt_{n}(call):\n    if call.failed:\n        return again(call)\n" for n in range(40)
)
QUESTION = "What does KB-5 cost?"


@pytest.fixture(scope="module")
def form() -> PromptForm:
    return load_form(bundled_checkpoint(), FormName.PLAIN)


@pytest.fixture(scope="module")
def chunker() -> Chunker:
    return Chunker.of_model(bundled_checkpoint(), ChunkingConfig(128))


def documented_endings() -> list[str]:
    """Return the questions of the page's calls of `generate`."""
    page = (ROOT / "docs/howto/rag.md").read_text(encoding="utf-8")
    found = re.findall(r'client\.generate\(\w+, f"(.+?)"', page)
    return [ending.replace("\\n", "\n").replace("{question}", QUESTION) for ending in found]


@pytest.mark.parametrize("document", [TABLE, CODE], ids=["table", "code"])
def test_the_recipe_writes_the_measured_prompt(form: PromptForm, chunker: Chunker, document: str) -> None:
    pieces = [chunk.text for chunk in chunker.chunks(document)]
    assert len(pieces) > 3
    measured = form.build([PromptChunk("", form.tokenize(piece)) for piece in pieces], QUESTION)
    text = form.tokenizer.decode(measured.token_ids[len(form.head) :])
    space = ChunkSpace(ModelFingerprint.of({"weights": "none"}), "docs", form.head)
    resolver = SegmentResolver(form.tokenize, KnownChunks(), None)
    endings = documented_endings()
    assert len(endings) == 2
    for ending in endings:
        assert text == document + ending
        segments = [Segment(text=piece) for piece in pieces]
        prompt = asyncio.run(resolver.prompt(space, segments, Segment(text=ending, plain=True), 1 << 20))
        assert list(prompt.token_ids) == measured.token_ids


def test_the_rag_app_writes_the_measured_prompt(chunker: Chunker) -> None:
    pytest.importorskip("apsw")
    pytest.importorskip("sqlite_vec")
    spec = importlib.util.spec_from_file_location("examples_rag_app", ROOT / "examples/rag_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    asked: list[tuple[list[Any], str]] = []
    client = SimpleNamespace(
        put_chunks=lambda pieces: None,
        prefetch=lambda pieces: None,
        generate=lambda segments, ending, **options: asked.append((segments, ending)),
    )
    with module.RagApp(client, chunker) as app:
        app.add("one", "The keeper trims the lamp.")
        app.add("other", "The lamp is trimmed.\n")
        app.ask(QUESTION)
    ((segments, ending),) = asked
    text = "".join(one.text if isinstance(one, Plain) else one for one in segments)
    assert sorted(text.splitlines()) == ["The keeper trims the lamp.", "The lamp is trimmed."]
    assert text.endswith("\n")
    assert ending == documented_endings()[0]

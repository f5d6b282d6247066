"""Round trip of generated documents: their chunks, joined, are the document."""

from __future__ import annotations

from itertools import product
from random import Random

from benchmarks.support.figures import Figure
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from tests.fakes.kinds_of_text import KINDS

FILES = 200
QUICK_FILES = 24
TOKENS_MAX = (512, 64)


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """Count the files of which a chunk is too long or has other tokens than its text alone, or whose chunks
    are not the file when joined."""
    chunkers = [Chunker.of_model(bundled_checkpoint(), ChunkingConfig(size)) for size in TOKENS_MAX]
    names = list(KINDS)
    files = QUICK_FILES if quick else FILES
    glued, pieces = [], 0
    for number in range(files):
        name = names[number % len(names)]
        text = KINDS[name](Random(f"{seed} {number}"))
        for chunker, markdown in product(chunkers, (False, True)):
            chunks = list(chunker.chunks(text, markdown))
            pieces += len(chunks)
            if "".join(chunk.text for chunk in chunks) != text or not all(
                chunk.token_ids == chunker.token_ids(chunk.text)
                and len(chunk.token_ids) <= chunker.config.tokens_max
                for chunk in chunks
            ):
                glued.append(f"{name} {number}")
    detail = f"{pieces} chunks of {files} files of {len(names)} kinds {' '.join(glued)}".strip()
    return [Figure.at_most("glued_pieces", len(set(glued)), 0, "files", detail)]

"""The documents and questions that the console offers to begin with. They ship with Kintsugi."""

from __future__ import annotations

from typing import Any

from kintsugi.models.bundled import BUNDLED_NAME, showcase
from kintsugi.models.demo_questions import choose_shown, read_demo_questions
from kintsugi.models.passages import read_bundled_passages

DOCUMENTS = 6
"""As many as the demo uses: about 3,700 tokens."""


def find_samples(model: str, max_model_len: int) -> dict[str, Any]:
    """JSON form. The bundled model knows only the words of its own chronicles; others read the passages, as
    many as surely fit."""
    if model == BUNDLED_NAME:
        shown = showcase()
        documents = [{"title": f"Chronicle {n}", "text": text} for n, text in enumerate(shown.chunks, 1)]
        return {"documents": documents, "questions": [shown.question], "max_tokens": 1}
    passages = read_bundled_passages()[: max(1, min(DOCUMENTS, max_model_len // 800))]
    shown_first = choose_shown(read_demo_questions())
    titles = {passage.title for passage in passages}
    others = [one.question for one in read_demo_questions() if one.passage in titles and one != shown_first]
    first = [shown_first.question] if shown_first.passage in titles else []
    return {
        "documents": [{"title": passage.title, "text": passage.text} for passage in passages],
        "questions": [*first, *others[:8]],
        "max_tokens": 48,
    }

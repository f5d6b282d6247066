"""OpenAI's own client: chunks as marked parts of a message, a streamed answer, and what it cost.

    kintsugi serve --model FOLDER
    python examples/openai_client.py --question "…" passage.txt another.txt

No chunk has to be stored in advance: a chunk that is missed twice is stored in the background. From then on
it is loaded instead of computed, in every message of the same namespace that contains its text.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai


@dataclass(frozen=True)
class Answer:
    """A streamed answer and its accounting."""

    text: str
    accounting: Mapping[str, Any]
    """Chunks hit and missed, tokens recomputed, bytes loaded: see `kintsugi.core.accounting`."""


def ask(url: str, namespace: str, chunks: Sequence[str], question: str, max_tokens: int = 64) -> Answer:
    """Stream an answer to a question about chunks. The stream's last event has the accounting."""
    client = openai.OpenAI(base_url=url, api_key="none", default_headers={"X-Kintsugi-Namespace": namespace})
    model = client.models.list().data[0].id
    parts = [{"type": "text", "text": chunk, "kintsugi": {"chunk": True}} for chunk in chunks]
    content: Any = [*parts, {"type": "text", "text": question}]
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, accounting = "", {}
    for event in stream:
        text += "".join(choice.delta.content or "" for choice in event.choices)
        given = getattr(event, "kv_transfer_params", None) or {}
        accounting = given.get("kintsugi", accounting)
    return Answer(text, accounting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="text files, each a chunk")
    parser.add_argument("--question", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--namespace", default="examples")
    arguments = parser.parse_args()
    chunks = [path.read_text(encoding="utf-8") for path in arguments.files]
    answer = ask(arguments.url, arguments.namespace, chunks, arguments.question)
    print(answer.text)
    for name in ("outcome", "reason", "tokens_hit", "tokens_missed", "tokens_recomputed"):
        print(f"{name}: {answer.accounting.get(name)}")


if __name__ == "__main__":
    main()

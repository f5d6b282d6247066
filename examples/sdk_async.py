"""A RAG answer with the SDK on an event loop: chunks in, prefetch at retrieval, the answer streamed.

    python examples/sdk_async.py [--address HOST:PORT] [--namespace NAME] [--token TOKEN] [--tls-ca FILE]

Needs a gateway, for example the one that `kintsugi serve --model FOLDER` starts. Fixed passages take the
place of retrieval.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from kintsugi import AsyncClient, ClientOptions, Plain
from kintsugi.sdk.types import Answer

PASSAGES = [
    "The lighthouse at Cape Arden was built in 1871 and has been lit by a single keeper since.",
    "Its keeper, Ada Hollis, writes the weather into a ledger every four hours.",
    "In the winter of 1884 the ledger has no entry for nine days.",
]
QUESTION = "\nQuestion: who kept the light in 1884?\nAnswer:"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="127.0.0.1:7500")
    parser.add_argument("--namespace", default="lighthouses")
    parser.add_argument("--token", help="token from `kintsugi token`, if the gateway requires one")
    parser.add_argument("--tls-ca", type=Path, help="PEM file of the authority that signed the gateway")
    arguments = parser.parse_args()
    options = ClientOptions(token=arguments.token, tls_ca=arguments.tls_ca)
    async with AsyncClient(arguments.address, arguments.namespace, options=options) as client:
        # Once per document, when it is indexed: compute and store its KV. Repeating the call costs a lookup.
        chunks = await client.put_chunks(PASSAGES)
        print("stored:", ", ".join(f"{chunk.key[:8]} ({chunk.num_tokens} tokens)" for chunk in chunks))

        # Per question, as soon as retrieval has chosen the chunks.
        await client.prefetch(chunks)

        # Chunks by key, in any order, with plain text before, between or after them.
        prompt = [Plain("Answer from these notes.\n"), *reversed(chunks)]
        async for event in client.stream(prompt, QUESTION, max_tokens=24):
            if isinstance(event, Answer):
                hit = event.accounting.get("tokens_hit", 0)
                print(f"\n{event.outcome}: {hit} of {event.usage.prompt_tokens} prompt tokens were loaded")
            else:
                print(event.text, end="", flush=True)


if __name__ == "__main__":
    asyncio.run(main())

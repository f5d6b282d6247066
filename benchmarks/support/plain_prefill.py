"""Runs vLLM without the plugin in a separate process, which prefills chunks on request.

It loads the same checkpoint with the same arguments as a precompute worker, with vLLM's default prefix
caching. Between requests it sleeps, so two engines can take turns on one machine, and other load on the
machine affects both equally.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from kintsugi.engine.local import LocalEngine, Prompt


class PlainPrefill:
    """The parent's side. A context manager; inside it, the engine is started and warm."""

    def __init__(
        self,
        model: str,
        engine: dict[str, Any],
        prefix: Sequence[int],
        batches: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        """``batches``: chunks' token ids in batches for vLLM, each chunk after the prefix."""
        self._prefix = list(prefix)
        self._batches = list(batches)
        self._next = 0
        self._reached = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, model, json.dumps(engine)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.tokens = 0
        """Tokens of the chunks prefilled so far, without their prefixes."""
        self.seconds = 0.0

    def __enter__(self) -> PlainPrefill:
        self._ask([[1, 2, 3]])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def turn(self, tokens: int, measured: bool) -> None:
        """Prefill whole batches until `tokens` are prefilled in all. If not measured, skip them."""
        while self._reached < tokens and self._next < len(self._batches):
            batch = self._batches[self._next]
            self._next += 1
            self._reached += sum(map(len, batch))
            if measured:
                self.seconds += self._ask(batch)
                self.tokens += sum(map(len, batch))

    def _ask(self, batch: Sequence[Sequence[int]]) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([[*self._prefix, *chunk] for chunk in batch]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("SECONDS "):
                return float(line.split()[1])
        raise RuntimeError("the plain engine ended; its words are on stderr")


def main() -> None:
    model, engine = sys.argv[1], json.loads(sys.argv[2])
    with LocalEngine.start(model, **engine) as llm:
        for line in sys.stdin:
            prompts = [Prompt(prompt, max_tokens=1) for prompt in json.loads(line)]
            started_s = time.perf_counter()
            llm.generate(prompts)
            print(f"SECONDS {time.perf_counter() - started_s}", flush=True)


if __name__ == "__main__":
    main()

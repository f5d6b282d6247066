"""The context: text that precedes chunks when they are prefilled, so that their KV is closer to a prompt's.

Engines, calibration and precompute must agree on every token of the context, because it is part of the chunk
space (docs/adr/0010). All of them get the tokens here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.models.passages import read_bundled_passages
from kintsugi.models.prompt_form import NO_ARGS, load_tokenizer
from kintsugi.models.texts import read_user_text

NONE, BUNDLED, CORPUS = "none", "bundled", "corpus"
"""Names of contexts. `CORPUS`: precompute jobs prefill each chunk after similar passages of its corpus; other
chunks are prefilled as with `BUNDLED`."""
BUNDLED_PASSAGES = 2
"""In measurements, more passages gained nothing, and one passage gained less."""
BUNDLED_TOKENS = 320
"""Tokens of each bundled passage. In measurements, half of this gained less."""
CONTEXT_TOKENS_MAX = 4096
"""Maximum length of a context. A longer text is most likely the wrong file."""


def tokenize_context(context: str, model: str, vllm_args: Mapping[str, Any] = NO_ARGS) -> tuple[int, ...]:
    """Return the token ids of a context with the tokenizer of `model`. See `encode_context`.

    ``vllm_args``: the engines' arguments, as in `load_tokenizer`. For `none`, no tokenizer is loaded.
    """
    return () if context == NONE else encode_context(context, load_tokenizer(model, vllm_args))


def encode_context(context: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids of a context, without special tokens.

    ``context``: `none`, `bundled` and `corpus` (the first `BUNDLED_PASSAGES` bundled passages, each cut to
    `BUNDLED_TOKENS` tokens) or the path of a text file, which is used whole. Raises `NotFound` for a missing
    file, `InvalidField` for a file that is not text, empty or too long.
    """
    if context == NONE:
        return ()
    if context in (BUNDLED, CORPUS):
        texts = [passage.text for passage in read_bundled_passages()[:BUNDLED_PASSAGES]]
        ids = [tuple(tokenizer(text, add_special_tokens=False).input_ids)[:BUNDLED_TOKENS] for text in texts]
        return sum(ids, ())
    purpose = f"`{NONE}`, `{BUNDLED}`, `{CORPUS}` or a text file with a passage or two"
    text = read_user_text(Path(context), "context", purpose)
    tokens = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    if not tokens:
        raise InvalidField(
            "context", f"{context} has no tokens; name a file with a passage or two, or `none`"
        )
    if len(tokens) > CONTEXT_TOKENS_MAX:
        raise InvalidField(
            "context",
            f"{context} has {len(tokens)} tokens; at most {CONTEXT_TOKENS_MAX} are allowed, and one or two "
            "passages of a chunk's length are enough",
        )
    return tokens

"""From a model and texts to a running engine whose store holds the chunks: what demo and generate share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kintsugi.cli.commands.shard import local_shard
from kintsugi.cli.rag import build_prompt
from kintsugi.cli.render import format_count
from kintsugi.cli.screen import Screen
from kintsugi.core.accounting import Outcome
from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.core.prompt import RagPrompt
from kintsugi.engine.local import LocalEngine
from kintsugi.quality.session import load_tokenizer

DEMO_SHAPE = "llama-210m"


@dataclass(frozen=True)
class ModelSource:
    """What answers."""

    path: str
    """A checkpoint folder, or a name that vLLM resolves."""
    name: str


@dataclass(frozen=True)
class Trust:
    """Why this model may be blended: a calibration report, or because the user says so."""

    report: Path | None = None
    regardless: bool = False

    @property
    def extra_config(self) -> dict[str, object]:
        """For the engine."""
        if self.regardless:
            return {"allow_uncalibrated": True}
        return {} if self.report is None else {"report": str(self.report.resolve())}


REGARDLESS = Trust(regardless=True)
UNCALIBRATED_NOTE = (
    "Blended without a calibration report (--allow-uncalibrated): nothing says that these answers are as "
    "good as full prefill's. Run kintsugi calibrate, and give its file with --report."
)


@dataclass(frozen=True)
class Session:
    """A prompt, and an engine that can answer it."""

    engine: LocalEngine
    tokenizer: Any
    prompt: RagPrompt
    not_saved_because: str | None
    """Why chunks could not be stored; None where all were."""


def resolve_model_argument(model: str) -> ModelSource:
    """The user's model. Raises `NotFound`."""
    if not Path(model).is_dir() and (Path(model).is_absolute() or model.startswith(".")):
        raise NotFound(f"{model} is not a folder; name the folder of a checkpoint")
    return ModelSource(model, Path(model).name or model)


def random_model(screen: Screen) -> ModelSource:
    """One of a real model's proportions, made on first use: its times are real, its answers gibberish."""
    with screen.engine_log(), screen.step(f"Preparing the model {DEMO_SHAPE} (random weights)"):
        from kintsugi.models.factory import make_checkpoint_once

        return ModelSource(str(make_checkpoint_once(DEMO_SHAPE)), DEMO_SHAPE)


@contextmanager
def opened(
    screen: Screen,
    model: ModelSource,
    texts: Sequence[tuple[str, str]],
    ending: str,
    namespace: str,
    max_tokens: int,
    trust: Trust,
) -> Iterator[Session]:
    """Tokenise, start a shard and the engine, store the chunks; close both afterwards."""
    with screen.step("Reading the tokenizer"):
        tokenizer, positions_max = load_tokenizer(model.path)
        prompt = build_prompt(tokenizer, texts, ending)
    length = len(prompt.token_ids) + max_tokens
    if length > positions_max:
        raise InvalidField(
            "chunk",
            f"the prompt has {len(prompt.token_ids)} tokens and {max_tokens} are to be generated, but "
            f"{model.name} reads at most {positions_max}; use fewer or shorter chunks",
        )
    with screen.engine_log(), ExitStack() as stack:
        with screen.step("Starting a store shard"):
            store = stack.enter_context(local_shard())
        with screen.step("Starting vLLM"):
            engine = LocalEngine.start(
                model.path,
                extra_config={
                    "store": store,
                    "prefix_token_ids": list(prompt.prefix),
                    "loading_controller": False,  # one prompt, to be shown blended whatever it takes
                    **trust.extra_config,
                },
                max_model_len=length,
            )
        with engine:
            with screen.step(f"Storing {format_count(len(prompt.chunks), 'chunk')}"):
                reason = _store_chunks(engine, prompt, namespace)
            yield Session(engine, tokenizer, prompt, reason)


def _store_chunks(engine: LocalEngine, prompt: RagPrompt, namespace: str) -> str | None:
    """Store every chunk once. The reason of the first that could not be stored, or None."""
    distinct = list(dict.fromkeys(chunk.token_ids for chunk in prompt.chunks))
    for generation in engine.save(prompt.prefix, distinct, namespace):
        accounting = generation.accounting or {}
        if accounting.get("outcome") != Outcome.SAVED.value:
            return str(accounting.get("reason") or "the connector did not answer")
    return None

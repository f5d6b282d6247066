"""A session of demo, generate or doctor: a running engine, and a store that holds the prompt's chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kintsugi.cli.models import prepare_model
from kintsugi.cli.render import format_count
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.core.plan import FormName, PromptChunk, RagPrompt, end_line
from kintsugi.engine.local import LocalEngine
from kintsugi.models.context import NONE, tokenize_context
from kintsugi.models.prompt_form import PromptForm, load_form
from kintsugi.models.reference import display_name, read_context_length

CHUNK_BYTES_MAX = 4 << 20
CHUNKS_MAX = 256
SHARD_RAM_BYTES = 4 << 30
"""Size of the shard's RAM tier; memory is allocated only when chunks are stored."""


UNTESTED = {"quality": "off"}
"""The connector's configuration without a test of quality."""
UNTESTED_NOTE = (
    "Blended without a test (--quality off): nothing shows that these answers are as good as those of full "
    "prefill. Run kintsugi calibrate, and pass its file with --report."
)


@dataclass(frozen=True)
class Asked:
    """The content of a prompt: chunks, question and form."""

    texts: Sequence[tuple[str, str]]
    """(title, text) of the chunks."""
    question: str
    form: FormName = FormName.AUTO


@dataclass(frozen=True)
class Session:
    """A prompt, and an engine that can answer it."""

    engine: LocalEngine
    form: PromptForm
    prompt: RagPrompt
    not_saved_because: str | None
    """Why chunks could not be stored; None if all were stored."""


def read_chunk(path: Path) -> tuple[str, str]:
    """Return (title, text) of a file that the user named. Raises `NotFound` or `InvalidField`."""
    if not path.is_file():
        raise NotFound(f"{path} is not a file; name a text file")
    if path.stat().st_size > CHUNK_BYTES_MAX:
        raise InvalidField("chunk", f"{path} exceeds {CHUNK_BYTES_MAX >> 20} MiB; split it into chunks")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidField("chunk", f"{path} is not UTF-8 text; convert it first") from None
    if not text.strip():
        raise InvalidField("chunk", f"{path} is empty; name a file with text")
    return path.name, end_line(text)


def build_prompt(form: PromptForm, asked: Asked) -> RagPrompt:
    """Build the prompt. Each chunk is tokenised separately, as when it is stored. Raises `InvalidField`."""
    if not 0 < len(asked.texts) <= CHUNKS_MAX:
        raise InvalidField("chunk", f"{len(asked.texts)} chunks; give between 1 and {CHUNKS_MAX}")
    chunks = [PromptChunk(title, form.tokenize(text)) for title, text in asked.texts]
    return form.build(chunks, asked.question)


@contextmanager
def local_shard() -> Iterator[str]:
    """Run a store shard in this process and yield its URL on loopback. Its folder and chunks are deleted at
    the end."""
    # Imported here: only commands that run an engine need a server.
    from kintsugi.store.shard.opening import ShardSpec, open_shard
    from kintsugi.store.shard.server import ShardServer

    with TemporaryDirectory(prefix="kintsugi-shard-") as folder:
        spec = ShardSpec(SHARD_RAM_BYTES, data_dir=Path(folder))
        with closing(open_shard(spec)) as shard, ShardServer(shard, "127.0.0.1:0") as server:
            yield f"grpc://{server.address}"


@contextmanager
def open_session(
    screen: Screen,
    model: str,
    asked: Asked,
    namespace: str,
    max_tokens: int,
    extra_config: Mapping[str, object],
    context: str = NONE,
) -> Iterator[Session]:
    """Tokenise the prompt, start a shard and an engine, and store the chunks. Closes both at the end.

    ``model``: a checkpoint folder, the reference model's name, or a name that vLLM resolves.
    ``extra_config``: of the connector. ``context``: as for `tokenize_context`.
    """
    prepare_model(screen, model)
    with screen.step("Reading the tokenizer"):
        positions_max = read_context_length(model)
        form = load_form(model, asked.form)
        prompt = build_prompt(form, asked)
        context_ids = tokenize_context(context, model)
    length = len(prompt.token_ids) + max_tokens
    if length > positions_max:
        raise InvalidField(
            "chunk",
            f"the prompt has {len(prompt.token_ids)} tokens and the answer {max_tokens}, but "
            f"{display_name(model)} reads at most {positions_max} in all; use fewer or shorter chunks",
        )
    saved = max(len(chunk.token_ids) for chunk in prompt.chunks) + len(prompt.prefix) + len(context_ids) + 2
    with screen.engine_log(), ExitStack() as stack:
        with screen.step("Starting a store shard"):
            store = stack.enter_context(local_shard())
        with screen.step("Starting vLLM"):
            engine = LocalEngine.start(
                model,
                extra_config={
                    "store": store,
                    "prefix_token_ids": list(prompt.prefix),
                    "context_token_ids": list(context_ids),
                    "loading_controller": False,  # blend the prompt even where a full prefill is faster
                    **extra_config,
                },
                max_model_len=min(max(length, saved), positions_max),
            )
        with engine:
            with screen.step(f"Storing {format_count(len(prompt.chunks), 'chunk')}"):
                reason = _store_chunks(engine, prompt, namespace)
            yield Session(engine, form, prompt, reason)


def _store_chunks(engine: LocalEngine, prompt: RagPrompt, namespace: str) -> str | None:
    """Store every chunk once. Returns why the first chunk that failed could not be stored, or None."""
    distinct = list(dict.fromkeys(chunk.token_ids for chunk in prompt.chunks))
    for generation in engine.save(prompt.prefix, distinct, namespace):
        if not generation.is_saved:
            return str((generation.accounting or {}).get("reason") or "the connector reported nothing")
    return None

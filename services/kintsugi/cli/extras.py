"""The extras that commands need, and the error if they are not installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

import typer

from kintsugi.cli.runner import command
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import Unavailable

SHOWN_MAX = 3
"""Maximum number of modules that an error names."""


@dataclass(frozen=True)
class Extras:
    """Extras of the distribution that have to be installed together."""

    names: str
    """Names of the extras, separated by commas, as in pip's brackets."""
    modules: tuple[str, ...]
    """Top-level modules that the commands must import and that only these extras install."""

    @property
    def missing(self) -> list[str]:
        """Modules that are not installed."""
        return [name for name in self.modules if find_spec(name) is None]

    @property
    def remedy(self) -> str:
        """The installation command. An engine on a CPU needs more than its extra, because pip would choose
        CUDA builds."""
        if "cpu" not in self.names.split(","):
            return f"pip install 'kintsugi-kv[{self.names}]'"
        on_gpu = self.names.replace("cpu", "gpu")
        return f"install kintsugi-kv[{on_gpu}], or without a GPU [{self.names}]; see docs/howto/install.md"

    def check(self, name: str) -> None:
        """Check that the command `name` can run. Raises `Unavailable`, with what to install."""
        if missing := self.missing:
            shown = ", ".join(missing[:SHOWN_MAX]) + (", …" if len(missing) > SHOWN_MAX else "")
            raise Unavailable(f"{name} needs modules that are not installed ({shown}): {self.remedy}")


_STORE_MODULES = ("lmdb", "prometheus_client", "grpc_health", "grpc_reflection")
_CHUNKING_MODULES = ("semantic_text_splitter", "tokenizers", "huggingface_hub")
_SERVING_MODULES = (
    *_STORE_MODULES,
    *_CHUNKING_MODULES,
    *("httpx", "kintsugi_checkpoints", "ray", "starlette", "uvicorn", "yaml"),
)
_ENGINE_MODULES = (*_STORE_MODULES, "kintsugi_checkpoints", "torch", "transformers", "vllm")

STORE = Extras("store", _STORE_MODULES)
ENGINE = Extras("cpu", _ENGINE_MODULES)
SERVING = Extras("serving", _SERVING_MODULES)
SERVING_HERE = Extras("serving,cpu", tuple(dict.fromkeys((*_SERVING_MODULES, *_ENGINE_MODULES))))
"""Gateway, shards and engines on this machine."""
PRECOMPUTE = Extras(
    "precompute,store",
    (*_STORE_MODULES, *_CHUNKING_MODULES, "docx", "inscriptis", "psutil", "pyarrow", "pypdf", "ray"),
)


def add_missing_command(app: typer.Typer, name: str, extras: Extras) -> None:
    """Add a stand-in for a command that cannot be imported. It takes any arguments, and its error names the
    extras to install."""

    @command(
        app,
        name,
        help=f"Not installed: needs kintsugi-kv with {extras.names}.",  # Rich would read brackets as markup
        context_settings={"ignore_unknown_options": True},
    )
    def refuse(
        screen: Screen, words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None
    ) -> None:
        extras.check(name)

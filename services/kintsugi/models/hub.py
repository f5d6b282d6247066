"""Finds checkpoints with hub names, `org/model`, in the hub's cache on this machine, or downloads them.

`huggingface_hub` reads the hub's address, the token, the cache folder and offline mode from its own
environment variables. It is installed with tokenizers and with vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kintsugi.core.errors import NotFound, PermissionDenied, Unavailable

MAIN = "main"
NAME_CHARS_MAX = 256
REASON_CHARS_MAX = 300
"""Maximum length of a library's error in our message; some are whole paragraphs."""


def is_hub_name(model: str | Path) -> bool:
    """Whether the name has the form `org/model`. A folder of that name takes precedence."""
    path = Path(model)
    return not path.is_absolute() and len(path.parts) == 2 and path.parts[0] not in (".", "..")


def snapshot(name: str | Path, revision: str = MAIN) -> Path:
    """Return the cache's folder for a model at a branch, tag or commit. The folder may not exist."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    repository = cache / f"models--{'--'.join(Path(name).parts)}"
    with contextlib.suppress(OSError):
        revision = (repository / "refs" / revision).read_text(encoding="ascii").strip()
    return repository / "snapshots" / revision


def name_of(folder: Path) -> str:
    """Return the hub name of a snapshot's folder; empty for other folders."""
    snapshots, repository = folder.parent.name, folder.parent.parent.name
    if snapshots != "snapshots" or not repository.startswith("models--"):
        return ""
    return repository.removeprefix("models--").replace("--", "/", 1)


def find_aliases(name: str, given: str, folder: str | Path) -> tuple[str, ...]:
    """Return the names, other than `name`, by which clients may request a model: its hub name, the folder or
    hub name `given` in the configuration, and the checkpoint's `folder`.

    Each appears once, the folder's absolute path last.
    """
    hub_name = name_of(Path(folder)) or _name_in_config(Path(folder))
    known = (hub_name, given, given.rstrip("/"), str(folder), str(Path(folder).resolve()))
    return tuple(dict.fromkeys(alias for alias in known if alias and alias != name))


def _name_in_config(folder: Path) -> str:
    """Return the hub name in the checkpoint's config; empty if there is none."""
    try:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""  # vLLM reports the error in the config
    # It may also be a folder of the machine that wrote the config, which must not be published.
    return named if isinstance(named, str) and len(named) <= NAME_CHARS_MAX and is_hub_name(named) else ""


def download_snapshot(name: str | Path, files: Sequence[str], revision: str = MAIN) -> Path:
    """Download the listed files that the model has, and return the snapshot's folder.

    The hub determines the commit, or the cache if the hub does not answer. Raises `NotFound`,
    `PermissionDenied`, and `Unavailable` if neither the cache nor the hub has the files.
    """
    with _translate_hub_errors(name):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name), revision=revision, allow_patterns=list(files)))


def safetensors_files(name: str, revision: str) -> list[str]:
    """Return the weight files at the root of a model's repository. Raises as `download_snapshot` does."""
    with _translate_hub_errors(name):
        from huggingface_hub import HfApi

        found = HfApi().list_repo_files(name, revision=revision)
    return sorted(file for file in found if file.endswith(".safetensors") and "/" not in file)


def tensors(name: str, file: str, revision: str) -> list[list[Any]]:
    """Return `[name, dtype, shape]` of each tensor in a file on the hub. Only the file's header is
    downloaded. Raises as `download_snapshot` does."""
    with _translate_hub_errors(name):
        from huggingface_hub import HfApi

        found = HfApi().parse_safetensors_file_metadata(name, file, revision=revision).tensors
    return [[tensor, info.dtype, list(info.shape)] for tensor, info in sorted(found.items())]


@contextlib.contextmanager
def _translate_hub_errors(model: str | Path) -> Iterator[None]:
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise NotFound(
            f"{model} is not a checkpoint folder, and cannot be downloaded: pip install huggingface_hub"
        ) from error
    # The library's transport has its own error classes. In older versions they derive from OSError.
    unreachable = (getattr(errors, name, OSError) for name in ("HTTPError", "XetDownloadError"))
    try:
        yield
    except errors.GatedRepoError as error:
        raise PermissionDenied(
            f"{model} requires permission: accept its terms at the hub, and set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise NotFound(
            f"{model} is neither a folder nor a model of the hub; check the name, or set HF_TOKEN to a token "
            "that may read it"
        ) from error
    except (OSError, ValueError, errors.SafetensorsParsingError, *unreachable) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unavailable(
            f"{model} cannot be downloaded ({reason[:REASON_CHARS_MAX]}); "
            f"connect this machine to the hub, or download it first (hf download {model})"
        ) from error

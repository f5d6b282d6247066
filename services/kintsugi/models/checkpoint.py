"""Computes the fingerprint of a model from its checkpoint folder: a digest of everything that a token's KV
depends on.

Every field of ``config.json`` counts unless it is known to be irrelevant, so that an unknown field causes a
miss and not a wrong answer. Values that an engine overrides on its command line (such as a RoPE base) are not
in the folder: pass them as `overrides`. Works without torch.
"""

from __future__ import annotations

import json
import logging
import re
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import blake3

from kintsugi.core.errors import Corrupted, InvalidField, KintsugiError, NotFound
from kintsugi.core.spaces import ModelFingerprint
from kintsugi.models import hub
from kintsugi.models.reference import resolve_model

log = logging.getLogger(__name__)

HEADER_BYTES_MAX = 100_000_000
"""Maximum size of a header in the safetensors format."""

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_SMALL_FILES = ("config.json", _INDEX, *_TOKENIZER_FILES, "chat_template.jinja")
"""The files that are read besides the weights. The template is not part of a fingerprint: the text that it
writes before the chunks is part of their chunk space as the prefix."""
_IRRELEVANT_FIELDS = frozenset({"_commit_hash", "_name_or_path", "transformers_version", "use_cache"})
_ROPE_FIELD = re.compile(r"rope|rotary|max_position_embeddings")
_FILE_NAME = re.compile(r"(?!\.)[^/\\\0]{1,255}")
_REVISION = re.compile(r"[0-9a-f]{40}")


def model_fingerprint(
    path: str | Path,
    kv_dtype: str,
    overrides: Mapping[str, object] | None = None,
    revision: str | None = None,
    max_model_len: int | None = None,
) -> ModelFingerprint:
    """Return the fingerprint of the checkpoint in folder `path`, with KV stored as `kv_dtype` (``bfloat16``,
    …).

    `max_model_len` is the engine's (None: vLLM's default). It counts only for LongRoPE, whose factors depend
    on it.

    A hub name (``org/model``) means its snapshot in the local hub cache, at `revision` (None: ``main``);
    `checkpoint_folder` downloads missing files. The reference model's name means its folder in the cache,
    which is made if it does not exist.

    Weights count by content. In a hub cache (``…/snapshots/<revision>``) the revision represents the content,
    so that tens of gigabytes need not be read or even downloaded: the headers of missing files come from the
    hub. The folder's name never counts. The first call reads every weight file once, on all cores; later
    calls in the same process only stat them.

    Raises `NotFound` for a missing folder or file, `Corrupted` for a file that cannot be parsed,
    `InvalidField` for an empty `kv_dtype`, and what `reference.fetch_model` raises.
    """
    if not kv_dtype:
        raise InvalidField("kv_dtype", "is empty; name the KV cache's element type, such as bfloat16")
    folder = _resolve_folder(Path(path), revision or hub.MAIN)
    config = read_config(folder)
    facts = {name: value for name, value in config.items() if name not in _IRRELEVANT_FIELDS}
    rope = {name: value for name, value in facts.items() if _ROPE_FIELD.search(name)}
    architecture = {name: value for name, value in facts.items() if name not in rope}
    factors = longrope_factors({**config, **(overrides or {})}, max_model_len)
    if factors is not None:
        rope["longrope_factors"] = factors
    return ModelFingerprint.of(
        {
            "architecture": _canonical(architecture),
            "kv_dtype": kv_dtype,
            "overrides": _canonical(overrides or {}),
            "rope": _canonical(rope),
            "tokenizer": _canonical(_tokenizer_digests(folder)),
            "weights": _canonical(_weights(folder)),
        }
    )


def digest_weights(path: str | Path) -> None:
    """Read and cache the weights of a checkpoint folder, so that a later fingerprint is fast.

    Call it in another thread. Errors are ignored, because `model_fingerprint` raises them.
    """
    try:
        if Path(path).is_dir():
            _weights(Path(path).resolve())
    except (KintsugiError, OSError) as error:
        log.debug("the weights were not digested in advance: %s", error)


def longrope_factors(config: Mapping[str, Any], max_model_len: int | None) -> str | None:
    """Return which of LongRoPE's two lists of factors vLLM uses for all prompts: ``short`` or ``long``; None
    for another rotation. vLLM uses ``long`` if `max_model_len` exceeds the length that the model was trained
    for. A `max_model_len` of None or -1 means vLLM's default."""
    text = _text_config(config)
    fields = _first_value(text, "rope_parameters", "rope_scaling") or {}
    of_layers = [one for one in fields.values() if isinstance(one, Mapping)]
    found = next((one for one in (fields, *of_layers) if _rope_type(one) in ("longrope", "su")), None)
    if found is None:
        return None
    trained = _first_value({**text, **found}, "original_max_position_embeddings")
    if max_model_len is None or max_model_len < 0:
        max_model_len = _first_value(text, "original_max_position_embeddings", "max_position_embeddings")
    if not isinstance(trained, int) or not isinstance(max_model_len, int):
        return "long"
    return "long" if max_model_len > trained else "short"


def tokenizer_digest(path: str | Path, revision: str | None = None) -> str:
    """Return the hexadecimal digest of the `tokenizer.json` that `precompute.chunking` uses; empty without
    one. The checkpoint is found as in `model_fingerprint`, with the same errors."""
    file = _resolve_folder(Path(path), revision or hub.MAIN) / "tokenizer.json"
    return _digest(file) if file.is_file() else ""


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint, which is found as in `model_fingerprint`, with the same
    errors."""
    return _json(_resolve_folder(Path(path), hub.MAIN) / "config.json")


def kv_dtype_of(dtype: str, cache_dtype: str = "auto", quantization: str | None = None) -> str:
    """Return the KV's element type for a fingerprint: dtypes of model and cache, and the weights'
    quantisation.

    All three count, because a quantised cache also rounds the KV of later layers.
    """
    return f"torch.{dtype.removeprefix('torch.')}/{cache_dtype}/{quantization}"


def checkpoint_folder(model: str | Path, revision: str | None = None) -> Path:
    """Return the folder with a model's configuration and tokenizer: `model` itself, the reference model's
    folder, or the snapshot of a hub name. The small files of a hub name are downloaded, its weights are not.

    All files of the tokenizer are downloaded: they are part of the fingerprint, so machines with different
    files would not find each other's chunks. Raises as `hub.download_snapshot` and `reference.fetch_model`
    do.
    """
    path = Path(resolve_model(model))
    if path.is_dir() or not hub.is_hub_name(path):
        return path
    return hub.download_snapshot(path, _SMALL_FILES, revision or hub.MAIN)


def complete(model: str | Path, revision: str | None = None) -> None:
    """Download the files of a hub name's snapshot that the fingerprint reads. If the hub does not answer, log
    a warning and use the files in the cache."""
    try:
        checkpoint_folder(model, revision)
    except KintsugiError as error:
        log.warning("%s", error)


def _resolve_folder(path: Path, revision: str) -> Path:
    path = Path(resolve_model(path))
    if path.is_dir():
        return path.resolve()
    is_hub_name = hub.is_hub_name(path)
    if is_hub_name and (snapshot := hub.snapshot(path, revision)).is_dir():
        return snapshot.resolve()
    hint = f"download it first (hf download {path}) and" if is_hub_name else "check the path, or"
    raise NotFound(f"{path} is not a checkpoint folder; {hint} name a folder that holds config.json")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(
            f"{path.parent} has no {path.name}; name the folder of a complete checkpoint"
        ) from None
    except (ValueError, RecursionError) as error:
        raise Corrupted(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise Corrupted(f"{path} does not hold a JSON object; download it again")
    return value


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return inner
    return config


def _first_value(config: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first field that exists and is not None."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _rope_type(fields: Mapping[str, Any]) -> str:
    return str(_first_value(fields, "rope_type", "type") or "default")


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _tokenizer_digests(folder: Path) -> dict[str, str]:
    return {name: _digest(folder / name) for name in _TOKENIZER_FILES if (folder / name).is_file()}


def _weights(folder: Path) -> dict[str, object]:
    """Return names, dtypes and shapes of all tensors, and a digest or revision of their content."""
    revision = _hub_revision(folder)
    if revision is not None:
        return {"tensors": sorted(_hub_tensors(folder, revision)), "revision": revision}
    files = _weight_files(folder)
    tensors = [tensor for file in files for tensor in _tensors(file)]
    # Sorted by digest, because the names of the files do not belong to the model.
    return {"tensors": sorted(tensors), "content": sorted(_digest(file) for file in files)}


def _hub_tensors(folder: Path, revision: str) -> list[list[Any]]:
    """Return the tensors, from files in the folder if they exist, otherwise from the hub."""
    name = hub.name_of(folder)
    if (folder / _INDEX).is_file() or any(folder.glob("*.safetensors")):
        files = [file.name for file in _weight_files(folder)]
    else:
        files = hub.safetensors_files(name, revision)
    if not files:
        raise NotFound(f"{name} has no *.safetensors; save the weights as safetensors first")
    found: list[list[Any]] = []
    for file in files:
        is_here = (folder / file).is_file()
        found += _tensors(folder / file) if is_here else hub.tensors(name, file, revision)
    return found


def _hub_revision(folder: Path) -> str | None:
    """Return the commit of a hub cache's snapshot folder; None for another folder."""
    return folder.name if hub.name_of(folder) and _REVISION.fullmatch(folder.name) else None


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files that the index lists; without an index, every safetensors file."""
    if (folder / _INDEX).is_file():
        shards = _json(folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise Corrupted(f"{folder / _INDEX} has no weight_map; download it again")
        if outside := [name for name in shards.values() if not _FILE_NAME.fullmatch(name)]:
            raise Corrupted(f"{folder / _INDEX} names {outside[0]!r}, which is not in the folder")
        return [folder / name for name in sorted(set(shards.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotFound(f"{folder} has no *.safetensors; save the weights as safetensors first")
    return files


def _tensors(file: Path) -> list[list[Any]]:
    """Return `[name, dtype, shape]` of each tensor, from the file's header."""
    size, mtime_ns = _stat(file)
    return [[name, dtype, list(shape)] for name, dtype, shape in _header(file, size, mtime_ns)]


def _digest(file: Path) -> str:
    return _content_digest(file, *_stat(file))


def _stat(file: Path) -> tuple[int, int]:
    """Return size and mtime_ns. Together with the path they are the key of a memoised digest."""
    try:
        status = file.stat()
    except FileNotFoundError:
        raise NotFound(f"{file} is missing; the checkpoint is incomplete, download it again") from None
    if not stat.S_ISREG(status.st_mode):
        raise Corrupted(f"{file} is a folder or a device, not a file; download it again")
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4096)
def _content_digest(file: Path, size: int, mtime_ns: int) -> str:
    """Return the blake3 digest of the file, computed on all cores: about 3 GB/s per core from the page
    cache."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    hasher.update_mmap(file)
    return hasher.hexdigest()


@lru_cache(maxsize=4096)
def _header(file: Path, size: int, mtime_ns: int) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Parse a header (https://huggingface.co/docs/safetensors): its length as a little-endian u64, then
    JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(HEADER_BYTES_MAX, size - 8):
            raise Corrupted(f"{file} is not a safetensors file or is cut off; download it again")
        text = stream.read(length)
    try:
        entries = json.loads(text)
        return tuple(
            (name, str(entry["dtype"]), tuple(int(extent) for extent in entry["shape"]))
            for name, entry in sorted(entries.items())
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Corrupted(f"{file} has an unreadable safetensors header; download it again") from None

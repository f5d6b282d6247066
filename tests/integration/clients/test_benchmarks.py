"""Load generators that nobody here wrote: vLLM's serving benchmark, and LMCache's engine benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.integration.clients.conftest import ServiceUnderTest, require, run_client

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

VLLM_BENCH = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""The module behind `vllm bench serve`. The command looks its version up under a name that the wheel for CPUs
does not have."""
RANDOM = ("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "4")
PREFIXES = (
    *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "48"),
    *("--prefix-repetition-suffix-len", "16", "--prefix-repetition-num-prefixes", "2"),
    *("--prefix-repetition-output-len", "4"),
)
PROMPTS = 4


@pytest.mark.parametrize("dataset", [RANDOM, PREFIXES], ids=["random", "prefix_repetition"])
@pytest.mark.parametrize("backend", [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllms_serving_benchmark(
    service: ServiceUnderTest, tmp_path: Path, backend: tuple[str, str], dataset: tuple[str, ...]
) -> None:
    run_client(
        [
            *(sys.executable, "-c", VLLM_BENCH),
            *("--backend", backend[0], "--endpoint", backend[1], "--base-url", service.http),
            *("--model", service.model, "--num-prompts", str(PROMPTS), *dataset, "--disable-tqdm"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
        ],
        tmp_path,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (PROMPTS, 0)
    assert result["total_output_tokens"] > 0


WORKLOADS = {
    "long-doc-permutator": (
        *("--ldp-num-contexts", "2", "--ldp-context-length", "96", "--ldp-system-prompt-length", "16"),
        *("--ldp-num-permutations", "2", "--ldp-max-output-length", "4"),
    ),
    "kv-tier-pressure": (
        *("--ktp-pool-size", "3", "--ktp-docs-per-request", "2", "--ktp-context-length", "64"),
        *("--ktp-system-prompt-length", "16", "--ktp-num-requests", "3", "--ktp-max-output-length", "4"),
    ),
    "long-doc-qa": ("--ldqa-document-length", "100", "--ldqa-max-output-length", "4"),
    "multi-round-chat": (
        *("--mrc-shared-prompt-length", "16", "--mrc-chat-history-length", "80", "--mrc-duration", "3"),
        *("--mrc-user-input-length", "8", "--mrc-output-length", "4", "--mrc-qps", "2"),
    ),
    "prefix-suffix-tuner": ("--psf-context-length", "400", "--psf-prefix-ratio", "0.6", "--psf-thrash", "1"),
    "random-prefill": ("--rp-request-length", "96", "--rp-num-requests", "3"),
    "rag-qa-quality": (
        *("--rag-dataset", "questions.jsonl", "--rag-num-samples", "2", "--rag-doc-align-tokens", "16"),
        *("--rag-max-output-length", "8"),
    ),
}
"""Every workload; those that read a capacity from an LMCache server are told it."""


@pytest.mark.parametrize("workload", WORKLOADS)
def test_lmcaches_engine_benchmark(
    service: ServiceUnderTest, clients_python: str, tmp_path: Path, workload: str
) -> None:
    require(clients_python, "lmcache")
    ask = {
        "question": "Where?",
        "answer": "Lima",
        "ctxs": [{"title": "Peru", "text": "Lima is its capital."}],
    }
    (tmp_path / "questions.jsonl").write_text(f"{json.dumps(ask)}\n" * 2)
    run_client(
        [
            *(clients_python, "-c", "from lmcache.cli.main import main; main()", "bench", "engine"),
            *("--engine-url", service.http),
            *("--model", service.model, "--workload", workload, "--no-interactive", "--quiet", "--no-csv"),
            *("--json", "--output-dir", str(tmp_path), *WORKLOADS[workload]),
            *("--kv-cache-volume", "1", "--tokens-per-gb-kvcache", "400"),
        ],
        tmp_path,
    )
    results = json.loads((tmp_path / "bench_summary.json").read_text())["results"]
    assert results["total_requests"] > 0
    assert results["failed_requests"] == 0

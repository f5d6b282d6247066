"""RayJobs that fill the store with corpora. Each has a Ray cluster of its own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from kintsugi.core.deploy import ModelExpert
from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.objects.base import (
    RAY_API_VERSION,
    Owner,
    make_claim,
    make_object,
    ray_cluster,
    worker_group,
)
from kintsugi_operator.objects.deployed import (
    CORPUS_KEY,
    EngineRevision,
    client_secrets,
    pod_basics,
    store_url,
)
from kintsugi_operator.objects.names import LABEL_CORPUS, LABEL_ROLE, join_name, labels, ray_named
from kintsugi_operator.objects.pods import (
    Manifest,
    Pod,
    Volume,
    claim_volume,
    template,
)
from kintsugi_operator.objects.service import model_env, model_volumes, revision_map_name

CORPUS = "corpus"
REVISION = "/etc/kintsugi/revision"
STATE = "/state"
CORPUS_FILES = "/corpus"
BOUND = ("dtype", "hf_overrides", "kv_cache_dtype", "quantization", "revision")
"""Arguments of vLLM that are part of a chunk's identity: corpora take them from the service."""
LOADING = ("load_format", "max_model_len", "trust_remote_code")
"""Arguments without which some models cannot be loaded."""
RETRIES = 2
"""Retries of a corpus's job. Each continues where the last attempt stopped."""


def _prompt_options(revision: EngineRevision) -> list[str]:
    """Return the options for the text that precedes the revision's chunks when they are prefilled."""
    model = revision.model
    expert = model.expert
    options = [] if expert.form == ModelExpert.form else ["--form", expert.form]
    if model.system_prompt is not None:
        options += ["--system", f"{REVISION}/system-prompt.txt"]
    return options if expert.context == ModelExpert.context else [*options, "--context", expert.context]


def _system_prompt(service: str, revision: EngineRevision) -> list[Volume]:
    """Return a volume with the system prompt that precedes the revision's chunks; none without one."""
    if revision.model.system_prompt is None:
        return []
    source = {"configMap": {"name": revision_map_name(service, revision.name), "defaultMode": 0o444}}
    return [Volume("revision", REVISION, source, read_only=True)]


def corpus_labels(service: str, corpus: str) -> dict[str, str]:
    """Labels of all objects of a corpus."""
    return {**labels(service, part=CORPUS), LABEL_CORPUS: corpus}


def ledger_claim(corpus: CorpusPrecomputeSpec, owner: Owner) -> Manifest:
    """Return the claim of the ledger, which records the chunks of every document and outlives jobs."""
    tags = corpus_labels(corpus.service, owner.name)
    return make_claim(owner, join_name(owner.name, "ledger"), tags, corpus.expert.ledger_gib, "")


def corpus_job(
    corpus: CorpusPrecomputeSpec,
    owner: Owner,
    service: BlendServiceSpec,
    revision: EngineRevision,
    run: str,
) -> Manifest:
    """The RayJob that fills the store with a corpus for one revision of a service. The driver runs on the
    head, with the ledger; engines run on workers."""
    service = revision.within(service)
    tags = corpus_labels(corpus.service, owner.name)
    workers = corpus.workers
    volumes = model_volumes(service)
    if corpus.volume_claim:
        volumes.append(claim_volume("corpus", CORPUS_FILES, corpus.volume_claim, read_only=True))
    volumes += client_secrets(service, CORPUS_KEY)
    shared: dict[str, Any] = {"env": model_env(service), "env_secret": corpus.credentials_secret}
    shared["more"] = service.pod_template("corpora")
    head = template(
        Pod(
            **pod_basics(service, corpus.service, {**tags, LABEL_ROLE: "head"}),
            **shared,
            cpus=corpus.expert.head.cpus,
            memory=corpus.expert.head.memory,
            volumes=[
                claim_volume("state", STATE, join_name(owner.name, "ledger")),
                *volumes,
                *_system_prompt(corpus.service, revision),
            ],
            is_head=True,
        )
    )
    pod = template(
        Pod(
            **pod_basics(service, corpus.service, {**tags, LABEL_ROLE: "worker"}),
            **shared,
            cpus=workers.cpus,
            memory=workers.memory,
            gpus=workers.gpus,
            gpu_resource=service.engines.expert.gpu_resource,
            shared_memory="2Gi",
            volumes=volumes,
        )
    )
    group = worker_group("worker", pod, workers.replicas, {}, workers.cpus, workers.gpus, fixed=True)
    cluster = ray_cluster(head, [group], service.expert.ray_version)
    body = _job(corpus_command(corpus, owner, service, revision), cluster, corpus.expert.ttl_s)
    if corpus.suspend:
        # Set it only to true: KubeRay drops false, and a job queue may set the field.
        body["spec"]["suspend"] = True
    return make_object(owner, "RayJob", ray_named(owner.name, run), tags, body, RAY_API_VERSION)


def corpus_command(
    corpus: CorpusPrecomputeSpec, owner: Owner, service: BlendServiceSpec, revision: EngineRevision
) -> list[str]:
    """The job's command. It stores chunks in the chunk space that the service reads."""
    model, workers = service.model, corpus.workers
    vllm = {name: value for name, value in service.engines.vllm.items() if name in (*BOUND, *LOADING)}
    if workers.gpus > 1:
        vllm["tensor_parallel_size"] = workers.gpus
    expert, columns = corpus.expert, corpus.expert.columns
    options = {
        "--model": model.path,
        "--namespace": corpus.namespace,
        "--store": store_url(service, corpus.service, owner.namespace),
        "--corpus": owner.name,
        "--state": STATE,
        "--tokens-max": str(corpus.tokens_max),
        "--overlap": str(corpus.overlap),
        "--columns": f"text={columns.text},id={columns.id},version={columns.version}",
        "--workers": str(workers.replicas),
        "--gpus-per-worker": str(workers.gpus),
        "--tokens-per-s": f"{expert.tokens_per_s:g}",
        "--errors-share": f"{expert.errors_share:g}",
        "--engine": json.dumps(vllm, sort_keys=True),
        **({"--format": expert.format} if expert.format else {}),
        **({"--codec": model.codec} if model.codec != "raw" else {}),
    }
    # `run` and `--`: a source may look like a subcommand or an option.
    flat = [part for pair in options.items() for part in pair] + _prompt_options(revision)
    if not service.engines.expert.portable:
        flat.append("--no-portable")
    if not service.engines.expert.plain_copies:
        flat.append("--no-plain-copies")
    if expert.retire_old_editions:
        flat.append("--retire")
    return ["kintsugi", "precompute", "run", *flat, "--replace-model", "--json", "--", corpus.source]


def _job(command: Sequence[str], cluster: Manifest, ttl_s: int) -> Manifest:
    return {
        "spec": {
            "entrypoint": shlex.join(command),
            # KubeRay submits the job over HTTP, without a submitter pod.
            "submissionMode": "HTTPMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": ttl_s,
            "backoffLimit": RETRIES,
            "rayClusterSpec": cluster,
        }
    }

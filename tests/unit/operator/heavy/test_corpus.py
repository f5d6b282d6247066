"""When a corpus is filled, and what its job is told."""

from __future__ import annotations

import dataclasses
import json
import shlex
from datetime import UTC, datetime
from typing import Any

import pytest
from typer.main import get_command

from kintsugi.cli.main import app
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.manifest import from_manifest
from kintsugi_operator.api.status import CorpusPrecomputeStatus
from kintsugi_operator.desired.corpus import CorpusDesired, CorpusObserved, Target, figures_in, plan_corpus
from kintsugi_operator.objects.base import Owner
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.names import LABEL_SERVICE
from kintsugi_operator.observed.views import JobState, JobView
from tests.unit.operator.specs import NOW, secret_keys, spec_of

OWNER = Owner("CorpusPrecompute", "handbook", "team", "uid-2")
FRESH = CorpusPrecomputeStatus()


def corpus_of(**values: Any) -> CorpusPrecomputeSpec:
    base = {"service": "acme", "namespace": "tenant", "source": "/corpus/docs"}
    return from_manifest(CorpusPrecomputeSpec, {**base, **values})


def target(path: str = "/models/small", ready: bool = True) -> Target:
    spec = spec_of(model={"path": path})
    return Target(spec, EngineRevision.of(spec), ready)


def decide(
    corpus: CorpusPrecomputeSpec,
    before: CorpusPrecomputeStatus = FRESH,
    state: JobState = JobState.ABSENT,
    now: datetime = NOW,
    at: Target | None = None,
    **figures: Any,
) -> CorpusDesired:
    jobs = {before.job: JobView(state, name=before.job)} if before.job else {}
    observed = CorpusObserved(at or target(), jobs, figures)
    return plan_corpus(corpus, OWNER, before, observed, now)


def job_of(desired: CorpusDesired) -> dict[str, Any]:
    (job,) = [one for one in desired.objects if one["kind"] == "RayJob"]
    return job


def test_it_runs_at_once() -> None:
    first = decide(corpus_of())
    job = job_of(first)
    assert job["metadata"]["name"] == first.status.job
    assert job["metadata"]["labels"][LABEL_SERVICE] == "acme"
    command = shlex.split(job["spec"]["entrypoint"])
    assert command[:3] == ["kintsugi", "precompute", "run"]
    assert command[-2:] == ["--", "/corpus/docs"]
    given = dict(zip(command[3:-4:2], command[4:-4:2], strict=True))
    assert given["--model"] == "/models/small"
    assert given["--namespace"] == "tenant"
    assert given["--store"] == "shards://acme-directory.team.svc:7410"
    assert given["--corpus"] == "handbook"


def test_its_head_has_the_size_that_the_spec_names() -> None:
    job = job_of(decide(corpus_of(expert={"head": {"cpus": 4, "memory": "20Gi"}})))
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["resources"]["limits"] == {"cpu": "4000m", "memory": "20Gi"}


def test_its_engines_have_the_environment_of_the_services() -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    spec = spec_of(
        expert={
            "podTemplates": {
                "engines": {"env": [proxy]},
                "gateway": {"env": [{"name": "OTEL_SERVICE_NAME", "value": "x"}]},
            }
        }
    )
    cluster = job_of(decide(corpus_of(), at=Target(spec, EngineRevision.of(spec), True)))["spec"][
        "rayClusterSpec"
    ]
    for template in (cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]):
        env = template["spec"]["containers"][0]["env"]
        assert proxy in env
        assert "OTEL_SERVICE_NAME" not in {one["name"] for one in env}


def test_it_shows_shards_a_token_of_its_own() -> None:
    spec = spec_of(store={"tokensSecret": "store-access"})
    job = job_of(decide(corpus_of(), at=Target(spec, EngineRevision.of(spec), True)))
    assert "?token_file=/etc/kintsugi/store-token/token" in job["spec"]["entrypoint"]
    cluster = job["spec"]["rayClusterSpec"]
    for template in (cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]):
        assert secret_keys(template, "store-access") == [("corpus-token", "/etc/kintsugi/store-token/token")]


def options_of(command: list[str]) -> dict[str, str]:
    """As the command line itself understands them. Fails where it does not know one."""
    group: Any = get_command(app)
    arguments = command[1:]
    while hasattr(group, "commands"):
        group, arguments = group.commands[arguments[0]], arguments[1:]
    return dict(group.make_context("kintsugi", list(arguments)).params)


def test_the_command_line_knows_what_jobs_say() -> None:
    spec = spec_of(
        model={
            "path": "org/name",
            "systemPrompt": "Be brief.",
            "codec": "int8",
            "expert": {"form": "plain", "context": "bundled"},
        },
        engines={
            "gpus": 2,
            "vllm": {
                "kv_cache_dtype": "fp8",
                "max_model_len": 8192,
                "max_num_seqs": 4,
                "tool_call_parser": "hermes",
                "trust_remote_code": True,
            },
            "expert": {"portable": False, "plainCopies": False},
        },
    )
    asked = corpus_of(expert={"retireOldEditions": True, "format": "csv"}, workers={"gpus": 4})
    at = Target(spec, EngineRevision.of(spec), True)
    job = job_of(decide(asked, at=at))
    told: Any = options_of(shlex.split(job["spec"]["entrypoint"]))
    assert (told["source"], told["model"], told["codec"], told["retire"]) == (
        "/corpus/docs",
        "org/name",
        "int8",
        True,
    )
    assert (told["portable"], told["plain_copies"], told["context"]) == (False, False, "bundled")
    # What the service's chunks are bound to, and not its other arguments.
    assert json.loads(told["engine"]) == {
        "kv_cache_dtype": "fp8",
        "max_model_len": 8192,
        "tensor_parallel_size": 4,
        "trust_remote_code": True,
    }
    (volume,) = [
        one
        for one in job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
        if one["name"] == "revision"
    ]
    assert volume["configMap"]["name"] == f"acme-revision-{at.revision.name}"
    assert str(told["system"]) == "/etc/kintsugi/revision/system-prompt.txt"
    assert (told["form"], told["context"]) == ("plain", "bundled")


def test_nothing_is_said_that_goes_without_saying() -> None:
    command = shlex.split(job_of(decide(corpus_of()))["spec"]["entrypoint"])
    assert not {
        "--system",
        "--form",
        "--context",
        "--no-plain-copies",
        "--codec",
        "--no-portable",
        "--retire",
        "--dtype",
    } & set(command)


def test_a_source_cannot_smuggle_options_or_a_shell() -> None:
    source = "--store grpc://evil; rm -rf / $(id)"
    command = shlex.split(job_of(decide(corpus_of(source=source)))["spec"]["entrypoint"])
    assert command[-2:] == ["--", source]


def test_nothing_is_started_before_the_store() -> None:
    waiting = decide(corpus_of(), at=target(ready=False))
    assert [one["kind"] for one in waiting.objects] == ["PersistentVolumeClaim"]
    assert waiting.status.phase == "Waiting"


def test_without_a_service_it_says_so() -> None:
    result = plan_corpus(corpus_of(), OWNER, FRESH, CorpusObserved(), NOW)
    assert not result.objects
    assert any("acme" in one.message for one in result.status.conditions)


def test_a_finished_job_is_left_and_its_report_kept() -> None:
    running = decide(corpus_of()).status
    done = decide(corpus_of(), running, JobState.SUCCEEDED, documents=7, chunks=31, coverage=1.0)
    assert not [one for one in done.objects if one["kind"] == "RayJob"]
    assert (done.status.phase, done.status.documents, done.status.coverage) == ("Succeeded", 7, 1.0)
    assert done.status.last_success_time
    later = decide(corpus_of(), done.status, JobState.SUCCEEDED, now=datetime(2027, 1, 1, tzinfo=UTC))
    assert later.status == done.status
    # KubeRay's clean-up, or a person's, does not start it again.
    gone = decide(corpus_of(), done.status)
    assert not [one for one in gone.objects if one["kind"] == "RayJob"]
    assert gone.status.phase == "Succeeded"


def test_another_model_fills_it_again() -> None:
    done = dataclasses.replace(decide(corpus_of()).status, phase="Succeeded")
    again = decide(corpus_of(), done, JobState.SUCCEEDED, at=target("/models/other"))
    assert again.status.job != done.job
    assert "--model /models/other" in job_of(again)["spec"]["entrypoint"]
    assert again.superfluous == (done.job,)


@pytest.mark.parametrize(
    "changed", [{"source": "/corpus/more"}, {"tokensMax": 256}, {"expert": {"errorsShare": 0.5}}]
)
def test_another_spec_fills_it_again(changed: dict[str, Any]) -> None:
    done = dataclasses.replace(decide(corpus_of()).status, phase="Failed")
    assert decide(corpus_of(**changed), done, JobState.FAILED).status.job != done.job


@pytest.mark.parametrize(
    "changed", [{"expert": {"ttlS": 7}}, {"suspend": True}, {"expert": {"ledgerGib": 3}}]
)
def test_what_does_not_change_the_chunks_does_not(changed: dict[str, Any]) -> None:
    running = decide(corpus_of()).status
    assert decide(corpus_of(**changed), running, JobState.RUNNING).status.job == running.job


def test_suspending_stops_a_job_and_starts_none() -> None:
    running = decide(corpus_of()).status
    stopped = decide(corpus_of(suspend=True), running, JobState.RUNNING)
    assert job_of(stopped)["spec"]["suspend"] is True
    never = decide(corpus_of(suspend=True))
    assert not [one for one in never.objects if one["kind"] == "RayJob"]
    assert never.status.phase == "Suspended"


def test_a_schedule_runs_it_again_but_never_twice_at_once() -> None:
    nightly = corpus_of(schedule="0 2 * * *")
    first = decide(nightly).status
    next_day = datetime(2026, 11, 22, 3, tzinfo=UTC)
    assert decide(nightly, first, JobState.RUNNING, now=next_day).status.job == first.job
    done = dataclasses.replace(first, phase="Succeeded")
    assert decide(nightly, done, JobState.SUCCEEDED).status.job == first.job
    second = decide(nightly, done, JobState.SUCCEEDED, now=next_day).status
    assert second.job != first.job
    assert second.last_schedule_time == "2026-11-22T02:00:00Z"


def test_taking_a_schedule_away_runs_nothing() -> None:
    done = dataclasses.replace(decide(corpus_of(schedule="0 2 * * *")).status, phase="Succeeded")
    assert decide(corpus_of(), done, JobState.SUCCEEDED).status.job == done.job


def test_the_report_is_found_in_a_log() -> None:
    log = 'started\n{"documents": 1}\n{\n "documents": 3, "chunks": 9,\n "coverage": 0.5\n}\nended {oops\n'
    assert figures_in(log) == {"documents": 3, "chunks": 9, "coverage": 0.5}
    assert figures_in("nothing {} here") == {}
    assert figures_in('{"documents": 1, "chunks": 2}') == {"documents": 1, "chunks": 2}
    assert figures_in("") == {}

"""`kintsugi serve`: what its options and files come to, and what it says while it runs."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from kintsugi.cli.commands import serve as command
from kintsugi.cli.commands.serve import (
    ServiceMonitor,
    build_service_spec,
    describe_progress,
    protect_store,
)
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi.cli.options import ServeTask, parse_engine_arguments, read_yaml
from kintsugi.cli.screen import Screen
from kintsugi.core.deploy import (
    GatewaySpec,
    GatewaySpecExpert,
    ModelSpec,
    ServiceSpec,
    StoreExpert,
    StoreSpec,
    TierSpec,
    directory_url,
    spec_from_yaml_mapping,
)
from kintsugi.core.errors import InvalidField, NotFound, Unavailable
from kintsugi.core.exchange import EngineInfo, LossReason, LostPart
from kintsugi.core.gate import GateProgress
from kintsugi.core.namespaces import NamespacePrivacy, PrivacyExpert
from kintsugi.gateway.access import add_grant, new_token
from kintsugi.models.bundled import BUNDLED_NAME
from kintsugi.models.reference import REFERENCE
from kintsugi.serving import deployment as service_module
from kintsugi.serving.deployment import DeploymentProgress, Service
from kintsugi.store.protocol.access import Caller, TokenFile, Verb


def test_without_anything_the_reference_model_is_served_on_this_machine() -> None:
    spec = build_service_spec(ServeTask())
    assert spec.model == ModelSpec(REFERENCE.name)
    assert spec.gateway.host == spec.store.expert.host == "127.0.0.1"


def test_options_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("model: {path: other}\nstore: {ram_gib: 1, shards: 3}\ngateway: {grpc_port: 1}\n")
    spec = build_service_spec(ServeTask(model="mine", config=file, ram="2GiB", engines=2, grpc_port=0))
    assert spec.model.path == "mine"
    assert (spec.store.ram_gib, spec.store.shards) == (2.0, 3)
    assert (spec.engines.replicas, spec.engines.replicas_max) == (2, None)
    assert spec.gateway.grpc_port == 0


def test_a_key_file_is_read_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "service.yaml"
    keys = tmp_path / "none.json"
    config.write_text(f"model: {{path: org/model}}\nstore: {{expert: {{keys_file: {keys}}}}}\n")
    done = CliRunner().invoke(app, ["serve", "--config", str(config)])
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "none.json cannot be read" in done.stderr


def test_options_of_the_gateway_win_over_the_file_and_name_files_absolutely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(
        "model: {path: other}\ngateway: {tokens_file: old, http_port: 1, expert: {audit_dir: /audit}}\n"
    )
    asked: list[ServeTask] = []
    monkeypatch.setattr(command, "run", lambda screen, task: asked.append(task) or ExitCode.OK)
    options = [
        *("--tokens-file", "t.json"),
        *("--tls-cert", "c.pem"),
        *("--tls-key", "k.pem"),
        "--insecure",
    ]
    assert CliRunner().invoke(app, ["serve", "--config", str(file), *options]).exit_code == 0
    (task,) = asked
    assert build_service_spec(task).gateway == GatewaySpec(
        http_port=1,
        tokens_file=str(Path("t.json").resolve()),
        tls_cert=str(Path("c.pem").resolve()),
        tls_key=str(Path("k.pem").resolve()),
        insecure=True,
        expert=GatewaySpecExpert(audit_dir="/audit"),
    )


def test_discovery_is_turned_on_by_namespace_on_top_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(
        "model: {path: other}\n"
        "privacy:\n"
        "  '*': {expert: {accounting: false}}\n"
        "  acme: {expert: {ttft_step_ms: 100}, discover: false}\n"
    )
    shown = CliRunner().invoke(
        app, ["serve", "--config", str(file), "--discover", "default", "--discover", "acme", "--print-config"]
    )
    assert shown.exit_code == 0, shown.output
    spec = build_service_spec(ServeTask(config=file, discover=["default", "acme", "team/*"]))
    assert spec.rules.privacy_of("default") == NamespacePrivacy(
        discover=True, expert=PrivacyExpert(accounting=False)
    )
    assert spec.rules.privacy_of("acme") == NamespacePrivacy(
        discover=True, expert=PrivacyExpert(ttft_step_ms=100.0)
    )
    assert spec.rules.privacy_of("team/a") == NamespacePrivacy(
        discover=True, expert=PrivacyExpert(accounting=False)
    )
    assert spec.rules.privacy_of("another") == NamespacePrivacy(expert=PrivacyExpert(accounting=False))
    assert build_service_spec(ServeTask()).privacy == {}


def test_discovery_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidField, match="discover: 'no spaces'"):
        build_service_spec(ServeTask(discover=["no spaces"]))


def test_shards_ask_for_a_token_where_the_gateway_does(tmp_path: Path) -> None:
    tokens = str(tmp_path / "tokens.json")
    spec = ServiceSpec(ModelSpec("m"), gateway=GatewaySpec(tokens_file=tokens))
    with protect_store(spec) as protected:
        store = protected.store
        url = directory_url(store)
        assert parse_qs(urlsplit(url).query) == {"token_file": [store.expert.token_file]}
        caller = TokenFile(Path(store.expert.tokens_file)).caller(Path(store.expert.token_file).read_text())
        assert caller == Caller("service", ("*",), frozenset(Verb))
        files = [Path(store.expert.tokens_file), Path(store.expert.token_file)]
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
        assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
        assert protected.gateway == spec.gateway
    assert not files[0].parent.exists()
    for own in (
        ServiceSpec(ModelSpec("m")),
        replace(spec, store=StoreSpec(expert=StoreExpert(tokens_file="mine", token_file="my-token"))),
        replace(spec, store=StoreSpec(tls_ca="ca", tls_cert="cert", tls_key="key")),
    ):
        with protect_store(own) as unchanged:
            assert unchanged is own


def test_a_bucket_needs_an_ssd_tier() -> None:
    store: dict[str, Any] = {"bucket_url": "s3://chunks/kintsugi", "data_dir": "/data"}
    with pytest.raises(InvalidField, match="a bucket stores the chunks that SSD tiers evict"):
        spec_from_yaml_mapping({"model": {"path": "m"}, "store": store})
    tiers = [{"path": "/ssd", "gib": 1}]
    assert spec_from_yaml_mapping({"model": {"path": "m"}, "store": {**store, "tiers": tiers}})


def test_ssd_tiers_keep_the_shards_identities_on_the_first(tmp_path: Path) -> None:
    store = build_service_spec(ServeTask(ssd=[f"{tmp_path}/a:1GiB", f"{tmp_path}/b:512MiB"])).store
    assert store.tiers == (TierSpec(f"{tmp_path}/a", 1.0), TierSpec(f"{tmp_path}/b", 0.5))
    assert store.data_dir == f"{tmp_path}/a/shards"
    file = tmp_path / "service.yaml"
    file.write_text("model: {path: org/model}\nstore: {data_dir: /data}\n")
    task = ServeTask(config=file, ssd=[f"{tmp_path}/a:1GiB"])
    assert build_service_spec(task).store.data_dir == "/data"


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="not a folder"):
        build_service_spec(ServeTask(model=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        (None, NotFound, "cannot be read"),
        ("model: [", InvalidField, "not YAML"),
        ("- a\n", InvalidField, "must be a mapping"),
        ("limits: {docs: {ram_gib: 1}}\nlimits: {}\n", InvalidField, "'limits' occurs twice in a mapping"),
        ("\xff", InvalidField, "not YAML"),
        ("a: " + "[" * 2_000, InvalidField, "not YAML"),
        ("model: 2026-99-99", InvalidField, "not YAML"),
        ("store: {shards: " + "9" * 5_000 + "}", InvalidField, "not YAML"),
        ("store: !!int ''", InvalidField, "not YAML"),
        ("store: !!bool x", InvalidField, "not YAML"),
        ("store: !!timestamp x", InvalidField, "not YAML"),
    ],
)
def test_a_file_that_is_none_is_refused(
    tmp_path: Path, text: str | None, error: type[Exception], match: str
) -> None:
    file = tmp_path / "service.yaml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(error, match=match):
        read_yaml(file)


def test_an_integer_that_no_double_can_hold_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("model: {path: m}\nengines: {vllm: {block_size: " + "9" * 400 + "}}\n")
    result = CliRunner().invoke(app, ["serve", "--config", str(file), "--print-config"])
    assert result.exit_code == 2
    assert "engines.vllm.block_size: must be a finite number" in result.stderr


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"a": ' + "9" * 5_000 + "}", '{"a": NaN}', '{"a": 1, "a": 2}']
)
def test_engine_arguments_that_are_no_json_object_are_refused(text: str) -> None:
    with pytest.raises(InvalidField, match=r"^engine: is not "):
        parse_engine_arguments(text)


def test_the_configuration_is_printed_as_serve_deploy_takes_it() -> None:
    printed = CliRunner().invoke(app, ["serve", "--print-config", "--shards", "2"])
    assert printed.exit_code == 0
    as_json = CliRunner().invoke(app, ["serve", "--print-config", "--shards", "2", "--json"])
    assert yaml.safe_load(printed.stdout) == json.loads(as_json.stdout)
    assert json.loads(as_json.stdout)["applications"][0]["deployments"][0]["num_replicas"] == 2


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is refused before anything starts."""

    def start(*arguments: Any) -> None:
        raise AssertionError("Ray was to be started")

    monkeypatch.setattr(command, "start_ray", start)


def refusal(*arguments: str) -> str:
    """What `kintsugi serve` says of bad input."""
    refused = CliRunner().invoke(app, ["serve", "--json", *arguments])
    assert refused.exit_code == 2, refused.output
    return str(json.loads(refused.stdout)["error"]["message"])


def test_two_gateways_are_refused_on_one_machine(no_ray: None, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("model: {path: other}\ngateway: {replicas: 2}\n")
    assert "gateway.replicas: each of 2 gateways needs a node of its own" in refusal("--config", str(file))
    printed = CliRunner().invoke(app, ["serve", "--config", str(file), "--print-config"])
    assert printed.exit_code == 0


@pytest.mark.parametrize(
    ("gateway", "options", "says"),
    [
        ("host: 0.0.0.0", [], "give --tokens-file and --tls-cert with --tls-key, or pass --insecure"),
        ("host: '::'", ["--tokens-file", "{tokens}"], "give --tls-cert with --tls-key, or pass --insecure"),
        ("replicas: 1", ["--tokens-file", "nowhere.json"], "nowhere.json cannot be read"),
        ("replicas: 1", ["--tls-cert", "c.pem"], "give tls_cert and tls_key together"),
        ("replicas: 1", ["--tls-cert", "c.pem", "--tls-key", "k.pem"], "c.pem cannot be read"),
    ],
)
def test_what_the_gateway_would_refuse_is_refused_at_once(
    no_ray: None, tmp_path: Path, gateway: str, options: list[str], says: str
) -> None:
    tokens = tmp_path / "tokens.json"
    add_grant(tokens, new_token("search", ["*"])[1])
    file = tmp_path / "service.yaml"
    file.write_text(f"model: {{path: other}}\ngateway: {{{gateway}}}\n")
    assert says in refusal("--config", str(file), *(option.format(tokens=tokens) for option in options))


@pytest.mark.parametrize("error", [Exception, TimeoutError, RuntimeError])
def test_a_ray_that_does_not_start_in_time_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def start(**options: Any) -> None:
        raise error("The current node timed out during startup.")

    monkeypatch.setattr(service_module, "start_local_ray", start)
    done = CliRunner().invoke(app, ["serve", "--model", BUNDLED_NAME, "--grpc-port", "0", "--http-port", "0"])
    assert done.exit_code == ExitCode.UNAVAILABLE
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("kintsugi: "))
    assert f"Ray does not start ({error.__name__}: The current node timed out during startup.)" in line
    assert "stop other processes and try again" in line
    assert "Traceback" not in done.output


class LateService(Service):
    """Comes up and gives no address in time, nor an end."""

    def deploy(self) -> None: ...

    def wait(self, *arguments: Any) -> None: ...

    def addresses(self) -> dict[str, str]:
        raise Unavailable("Ray does not reach the gateway")

    def stop(self) -> None:
        raise Unavailable("Ray does not end the service")


def test_what_ended_a_service_is_said_though_its_end_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(command, "start_ray", lambda *arguments: None)
    monkeypatch.setattr(command, "_listen_for_signals", lambda stop: None)
    monkeypatch.setattr(command, "Service", LateService)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.shutdown", lambda: ended.append(True))
    done = CliRunner().invoke(app, ["serve", "--model", BUNDLED_NAME, "--grpc-port", "0", "--http-port", "0"])
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert "kintsugi: Ray does not reach the gateway" in done.stderr
    assert ended == [True]


def test_what_is_missing_is_said_while_it_starts() -> None:
    found = [
        DeploymentProgress("StoreShard", 1, 1, "HEALTHY"),
        DeploymentProgress("Engine", 0, 2, "UPDATING"),
    ]
    assert describe_progress(found) == "StoreShard 1 of 1, Engine 0 of 2"
    assert describe_progress([]) == "waiting for Serve"


class StubService:
    """Says what a test makes it say; None: no engine answers."""

    def __init__(self) -> None:
        self.evidence: GateProgress | None = GateProgress(
            "learning", "3 of about 40 prompts were measured", pairs=3
        )
        self.running = 1
        self.lost = self
        self.losses: list[LostPart] = []

    def find_new(self) -> list[LostPart]:
        found, self.losses = self.losses, []
        return found

    def info(self, timeout_s: float) -> EngineInfo:
        if self.evidence is None:
            raise Unavailable("no engine answers; Serve starts it again")
        return EngineInfo("m", "00", (), True, 100, "on", progress=self.evidence)

    def progress(self) -> list[DeploymentProgress]:
        return [DeploymentProgress("Engine", self.running, 1, "HEALTHY" if self.running else "UPDATING")]


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_changes_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    service, now_s = StubService(), [0.0]
    watch = ServiceMonitor(service, Screen(as_json=True), clock=lambda: now_s[0])  # type: ignore[arg-type]

    def look() -> list[dict[str, Any]]:
        now_s[0] += 10.0
        watch.poll()
        watch.poll()
        return said(capsys)

    assert look() == []
    service.evidence = GateProgress("learning", "9 of about 40 prompts were measured", pairs=9)
    assert look() == [], "ten more prompts are worth a line"
    service.evidence = GateProgress("learning", "13 of about 40 prompts were measured", pairs=13)
    (line,) = look()
    assert (line["event"], line["state"], line["pairs"]) == ("blending", "learning", 13)
    service.evidence = opened = GateProgress("open", "at 75% of a full prefill's work", pairs=38, cost=0.75)
    (line,) = look()
    assert (line["state"], line["cost"], line["detail"]) == ("open", 0.75, opened.detail)
    assert look() == []
    service.running, service.evidence = 0, None
    events = look()
    assert [event["event"] for event in events] == ["replicas", "engine"]
    assert events[0] == {
        "event": "replicas",
        "deployment": "Engine",
        "running": 0,
        "wanted": 1,
        "status": "UPDATING",
    }
    service.running, service.evidence = 1, opened
    assert [event["event"] for event in look()] == ["replicas"]
    service.losses = [LostPart("Engine", 12, 0.0, LossReason.KERNEL_MEMORY)]
    assert look() == [
        {"event": "lost", "part": "Engine", "pid": 12, "at_s": 0.0, "reason": "kernel_memory"},
    ]

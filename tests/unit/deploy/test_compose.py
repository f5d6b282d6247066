"""The compose file and the dashboard: what they name exists."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kintsugi.cli.main import app
from kintsugi.core.deploy import ENGINE_METRICS_PORT, SHARD_METRICS_PORT, ServiceSpec, spec_from_yaml_mapping

REPOSITORY = Path(__file__).parents[3]
COMPOSE = REPOSITORY / "docker" / "compose.yaml"
DASHBOARD = REPOSITORY / "charts" / "kintsugi" / "dashboards" / "kintsugi.json"
SOURCES = (REPOSITORY / "services" / "kintsugi", REPOSITORY / "operators")
_VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")
_METRIC = re.compile(r"\b(kintsugi_[a-z0-9_]+)")
_SERIES = re.compile(r"_(total|bucket|sum|count)$")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """As compose reads it without any variable set."""
    document: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(lambda match: match[2], COMPOSE.read_text()))
    return document


def mounted(compose: dict[str, Any], service: str, target: str) -> Any:
    """What a service finds at a path."""
    sources = dict(reversed(one.split(":")[:2]) for one in compose["services"][service]["volumes"])
    return yaml.safe_load((COMPOSE.parent / sources[target]).read_text())


def service_of(compose: dict[str, Any]) -> ServiceSpec:
    return spec_from_yaml_mapping(mounted(compose, "kintsugi", "/etc/kintsugi/service.yaml"))


def test_every_key_is_one_of_composes(compose: dict[str, Any]) -> None:
    assert set(compose) <= {"name", "services", "volumes", "networks"}
    known = {"image", "command", "entrypoint", "user", "read_only", "cap_drop", "security_opt", "restart"}
    known |= {
        "stop_grace_period",
        "shm_size",
        "tmpfs",
        "environment",
        "ports",
        "volumes",
        "depends_on",
    }
    known |= {"network_mode"}
    for service in compose["services"].values():
        assert set(service) <= known
        assert "image" in service


def test_what_services_refer_to_is_there(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for source in (one.split(":")[0] for one in service.get("volumes", [])):
            assert source in compose["volumes"] or (COMPOSE.parent / source).is_file()
        assert set(service.get("depends_on", [])) <= set(compose["services"])


def test_nothing_is_published_beyond_loopback_and_only_files_of_ours_are_mounted(
    compose: dict[str, Any],
) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service.get("volumes", []):
            source, _, mode = volume.partition(":")
            if source not in compose["volumes"]:
                assert (COMPOSE.parent / source).resolve().is_relative_to(REPOSITORY)
                assert mode.endswith(":ro")
        assert service.get("network_mode") in (None, "none", "service:kintsugi")


def test_the_service_is_one_that_we_know_and_only_its_gateway_is_reachable(compose: dict[str, Any]) -> None:
    spec = service_of(compose)
    assert f"--model={spec.model.path}" in compose["services"]["kintsugi"]["command"]
    assert spec.store.expert.host == "127.0.0.1"
    published = {int(port.rsplit(":", 1)[1]) for port in compose["services"]["kintsugi"]["ports"]}
    assert {spec.gateway.grpc_port, spec.gateway.http_port} < published
    folders = [spec.store.data_dir, spec.gateway.expert.data_dir, *(tier.path for tier in spec.store.tiers)]
    assert all(folder.startswith("/data/") for folder in folders)


def test_the_command_is_one_that_the_cli_takes(compose: dict[str, Any]) -> None:
    """As far as a machine without containers can: the CLI reads the mounted configuration."""
    service = compose["services"]["kintsugi"]
    mounts = dict(reversed(one.split(":")[:2]) for one in service["volumes"])
    in_image = {"/opt/kintsugi/": f"{REPOSITORY}/checkpoints/"}
    arguments = [str(one) for one in service["command"]]
    here = in_image | {target: str(COMPOSE.parent / source) for target, source in mounts.items()}
    for target, path in here.items():
        arguments = [one.replace(target, path) for one in arguments]
    assert (COMPOSE.parent / mounts["/etc/kintsugi/service.yaml"]).is_file()
    result = CliRunner().invoke(app, [*arguments, "--print-config"])
    assert result.exit_code == 0, result.output
    assert f"{REPOSITORY}/checkpoints/kintsugi_checkpoints/bundled" in json.dumps(
        yaml.safe_load(result.output)
    )
    unknown = CliRunner().invoke(app, [*arguments, "--no-such-option"])
    assert unknown.exit_code != 0, "or nothing was checked"


def test_values_have_the_forms_of_composes_schema(compose: dict[str, Any]) -> None:
    duration, size = re.compile(r"(\d+(us|ms|s|m|h))+"), re.compile(r"\d+(b|k|kb|m|mb|g|gb)?")
    conditions = {"service_started", "service_healthy", "service_completed_successfully"}
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[a-zA-Z0-9._-]+", name)
        assert re.fullmatch(r"[\w./-]+:[\w.-]+", service["image"]), "a tag, so that it is the same tomorrow"
        if "kintsugi/" in service["image"]:
            assert service["image"].endswith(f":{version}")
        for field in ("command", "entrypoint", "cap_drop", "security_opt", "tmpfs", "ports", "volumes"):
            assert all(isinstance(one, str) for one in service.get(field, [])), (name, field)
        assert duration.fullmatch(service.get("stop_grace_period", "1s"))
        assert size.fullmatch(service.get("shm_size", "1g"))
        assert service.get("restart", "no") in ("no", "always", "on-failure", "unless-stopped")
        assert isinstance(service.get("read_only", False), bool)
        assert all(isinstance(one, str) for one in service.get("environment", {}).values()), "YAML has types"
        waits = service.get("depends_on", {})
        if isinstance(waits, dict):
            assert {one["condition"] for one in waits.values()} <= conditions


def test_prometheus_asks_the_ports_that_answer(compose: dict[str, Any]) -> None:
    spec = service_of(compose)
    (job,) = mounted(compose, "prometheus", "/etc/prometheus/prometheus.yml")["scrape_configs"]
    targets = {each["labels"]["part"]: each["targets"] for each in job["static_configs"]}
    assert targets == {
        "gateway": [f"127.0.0.1:{spec.gateway.http_port}"],
        "shard": [f"127.0.0.1:{SHARD_METRICS_PORT}"],
        "engine": [f"127.0.0.1:{ENGINE_METRICS_PORT}"],
    }


def expressions() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            yield target["expr"]


def names_in(path: Path) -> Iterator[str]:
    """Metric names that a module writes, whole, or made of a prefix and its own words."""
    tree = ast.parse(path.read_text())
    words = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    yield from (word for word in words if _METRIC.fullmatch(word))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.JoinedStr)
            and isinstance(node.values[0], ast.Constant)
            and len(node.values) == 2
        ):
            prefix = str(node.values[0].value)
            if prefix.startswith("kintsugi_"):
                yield from (f"{prefix}{word}" for word in words if re.fullmatch(r"[a-z_]+", word))


def test_every_metric_of_the_dashboard_is_written_somewhere() -> None:
    written = {
        _SERIES.sub("", name)
        for folder in SOURCES
        for path in folder.rglob("*.py")
        if "kintsugi_" in path.read_text()
        for name in names_in(path)
    }
    asked = {_SERIES.sub("", name) for expression in expressions() for name in _METRIC.findall(expression)}
    assert len(asked) >= 15
    assert asked <= written, asked - written


def test_panels_do_not_overlap_and_have_different_ids() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24

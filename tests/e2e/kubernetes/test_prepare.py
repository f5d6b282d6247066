"""The chart's jobs around a release, against a server that keeps CRDs and Secrets as an API server does."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from kintsugi.store.protocol.access import TokenFile
from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.manifest import from_manifest
from kintsugi_operator.controller.cluster import BLEND_SERVICE
from tests.e2e.kubernetes.clusters import APPLY, CRDS, Kube, Team, kube, needs_cluster, team_of, until
from tests.e2e.kubernetes.rendering import CHART, Manifest
from tests.e2e.kubernetes.test_scripts import Answer, run, server

NAMES = ("blendservices", "corpusprecomputes")
SECRETS = "/api/v1/namespaces/rag/secrets"
WANTED = {
    "client": "kintsugi-client",
    "gateway": "kintsugi-tokens",
    "name": "kintsugi",
    "namespaces": ["default"],
    "labels": {"app.kubernetes.io/instance": "kintsugi"},
}


def chart_crds() -> dict[str, Manifest]:
    """The chart's CRDs by their paths at the API server."""
    found = [yaml.safe_load((CHART / "crds" / f"{name}.yaml").read_text()) for name in NAMES]
    return {f"{CRDS}/{crd['metadata']['name']}": crd for crd in found}


def older_crds() -> dict[str, Manifest]:
    """The chart's CRDs as an older chart could have had them: of another version, with one field less."""
    older = chart_crds()
    for crd in older.values():
        crd["metadata"]["annotations"]["kintsugi.dev/version"] = "0.0.1"
        spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        del spec["properties"]["expert"]
    return older


class Objects:
    """Objects by path. Generations count what changes beside the metadata."""

    def __init__(self, objects: dict[str, Manifest] | None = None) -> None:
        self.kept = copy.deepcopy(objects or {})
        self.writes: list[str] = []
        self.refused = ""
        """Part of the path of requests that are refused."""

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        where, query = urlsplit(path).path, parse_qs(urlsplit(path).query)
        live = self.kept.get(where)
        if self.refused and self.refused in where and method == "PATCH":
            return 422, {"message": "a rule costs too much"}
        if method == "GET":
            return (200, live) if live is not None else (404, {})
        if method == "DELETE":
            return (200, {}) if self.kept.pop(where, None) is not None else (404, {})
        given = json.loads(body)
        if method == "POST":
            where, live = f"{where}/{given['metadata']['name']}", {}
        if live is None:
            return 404, {}
        changed = self._changed(live, given, headers["content-type"])
        if "dryRun" not in query:
            self.writes.append(where)
            self.kept[where] = changed
        return 200, changed

    def _changed(self, live: Manifest, given: Manifest, content_type: str) -> Manifest:
        metadata = {**live.get("metadata", {}), **given["metadata"]}
        for part in ("annotations", "labels"):
            metadata[part] = {**live.get("metadata", {}).get(part, {}), **given["metadata"].get(part, {})}
        if "stringData" in given:
            coded = {
                key: base64.b64encode(value.encode()).decode() for key, value in given["stringData"].items()
            }
            return {
                **live,
                **given,
                "metadata": metadata,
                "stringData": None,
                "data": {**live.get("data", {}), **coded},
            }
        assert content_type == APPLY
        if live["spec"] != given["spec"]:
            metadata["generation"] = metadata.get("generation", 1) + 1
        return {**live, **given, "metadata": metadata}


def prepare(objects: Objects, action: str, folder: Path, **env: str) -> Any:
    """Run a job of the chart against the objects."""
    (folder / "token").write_text("pod-token")
    with server(objects.answer) as url:
        values = {"API": url, "ACCOUNT": str(folder), "ACTION": action, "NAMESPACE": "rag", **env}
        return run("prepare.py", {f"KINTSUGI_{name}": value for name, value in values.items()})


def upgrade(objects: Objects, folder: Path, crds: dict[str, Manifest] | None = None) -> Any:
    """The job before an upgrade, with CRDs as its ConfigMap has them."""
    carried = folder / "crds"
    carried.mkdir(exist_ok=True)
    for path, crd in (crds or chart_crds()).items():
        (carried / f"{path.rsplit('/', 1)[1].split('.')[0]}.json").write_text(json.dumps(crd))
    return prepare(objects, "crds", folder, CRDS=str(carried))


def test_crds_of_an_older_chart_become_this_charts(tmp_path: Path) -> None:
    objects = Objects(older_crds())
    done = upgrade(objects, tmp_path)
    assert done.returncode == 0, done.stderr
    for path, crd in chart_crds().items():
        assert objects.kept[path]["spec"] == crd["spec"]
    assert len(objects.writes) == 2
    kept = copy.deepcopy(objects.kept)
    assert upgrade(objects, tmp_path).returncode == 0
    assert objects.kept == kept, "once more changes nothing"


def test_an_older_chart_leaves_newer_crds_alone(tmp_path: Path) -> None:
    """Another release of the cluster may have brought them."""
    newer = chart_crds()
    for crd in newer.values():
        crd["metadata"]["annotations"]["kintsugi.dev/version"] = "0.10.0"
    objects = Objects(newer)
    done = upgrade(objects, tmp_path)
    assert (done.returncode, objects.writes) == (0, [])
    assert "0.10.0" in done.stdout


def test_all_crds_are_upgraded_or_none(tmp_path: Path) -> None:
    objects = Objects(older_crds())
    objects.refused = "corpusprecomputes"
    done = upgrade(objects, tmp_path)
    assert done.returncode != 0
    assert "a rule costs too much" in done.stderr
    assert objects.writes == []


def test_a_version_that_is_stored_is_not_dropped(tmp_path: Path) -> None:
    old = older_crds()
    for crd in old.values():
        crd["status"] = {"storedVersions": ["v1alpha0", "v1alpha1"]}
    objects = Objects(old)
    done = upgrade(objects, tmp_path)
    assert (done.returncode, objects.writes) == (1, [])
    assert "v1alpha0" in done.stderr


def test_crds_that_are_not_there_are_left_to_who_installs_them(tmp_path: Path) -> None:
    """Argo CD runs the job before its first sync."""
    objects = Objects()
    assert upgrade(objects, tmp_path).returncode == 0
    assert objects.writes == []


def test_a_token_is_made_once_and_known_to_the_gateway(tmp_path: Path) -> None:
    objects = Objects()
    assert prepare(objects, "token", tmp_path, TOKENS=json.dumps(WANTED)).returncode == 0
    token = base64.b64decode(objects.kept[f"{SECRETS}/kintsugi-client"]["data"]["token"]).decode()
    file = tmp_path / "tokens.yaml"
    file.touch(0o600)
    file.write_bytes(base64.b64decode(objects.kept[f"{SECRETS}/kintsugi-tokens"]["data"]["tokens.yaml"]))
    caller = TokenFile(file).caller(token)
    assert (caller.name, caller.namespaces) == ("kintsugi", ("default",))
    annotations = objects.kept[f"{SECRETS}/kintsugi-client"]["metadata"]["annotations"]
    assert annotations["helm.sh/resource-policy"] == "keep"
    kept, writes = copy.deepcopy(objects.kept), list(objects.writes)
    done = prepare(objects, "token", tmp_path, TOKENS=json.dumps(WANTED))
    assert (done.returncode, objects.kept, objects.writes) == (0, kept, writes)
    assert token not in done.stdout + done.stderr


def test_the_token_goes_with_the_release(tmp_path: Path) -> None:
    objects = Objects()
    prepare(objects, "token", tmp_path, TOKENS=json.dumps(WANTED))
    assert len(objects.kept) == 2
    assert prepare(objects, "forget", tmp_path, TOKENS=json.dumps(WANTED)).returncode == 0
    assert objects.kept == {}
    assert prepare(objects, "forget", tmp_path, TOKENS=json.dumps(WANTED)).returncode == 0, (
        "twice is no error"
    )


@needs_cluster
@pytest.mark.timeout(120)
def test_a_real_api_server_takes_this_charts_crds_over_older_ones_with_objects_present() -> None:
    with kube() as cluster:
        cluster.install_crds()
        try:
            for path, crd in older_crds().items():
                take_over(cluster, path, crd)
            with team_of(cluster, {}) as team:
                before = team.make()
                for path, crd in chart_crds().items():
                    take_over(cluster, path, crd)
                until(lambda: pending(team), "the default status is read")
                after = team.wait_for(BLEND_SERVICE, "acme")
                assert from_manifest(BlendServiceSpec, after["spec"]) == from_manifest(
                    BlendServiceSpec, before["spec"]
                )
                assert after["metadata"]["generation"] == 1
        finally:
            cluster.install_crds()


def take_over(cluster: Kube, path: str, crd: Manifest) -> None:
    """Apply a CRD as the chart's job does."""
    cluster.request("PATCH", path, crd, APPLY, fieldManager="kintsugi-crds", force="true")


def pending(team: Team) -> bool:
    """Whether the API server gives an object that no operator has seen the CRD's default status."""
    status = team.wait_for(BLEND_SERVICE, "acme").get("status") or {}
    return bool(status.get("observedGeneration") == -1)

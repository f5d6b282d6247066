"""The jobs around a release's objects, chosen by `KINTSUGI_ACTION`.

crds: upgrade the CRDs to this chart's, because helm never upgrades what is in `crds/`. token: make a client's
token once; a rendered token would change with every rendering. forget: delete the token after the release.
"""

import base64
import hashlib
import json
import os
import pathlib
import re
import secrets
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

ACCOUNT = os.environ.get("KINTSUGI_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount")
API = os.environ.get("KINTSUGI_API") or "https://{KUBERNETES_SERVICE_HOST}:{KUBERNETES_SERVICE_PORT}".format(
    **{"KUBERNETES_SERVICE_HOST": "", "KUBERNETES_SERVICE_PORT": "", **os.environ}
)
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
VERSION = "kintsugi.dev/version"
KEEP = {"helm.sh/resource-policy": "keep"}
MERGE, APPLY = "application/merge-patch+json", "application/apply-patch+yaml"
PAUSE_S = 5.0
"""Wait after a change, because each API server loads a changed CRD independently."""


def call(method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
    """Send a request and return the object; None if it does not exist. Print and raise other refusals."""
    token = pathlib.Path(ACCOUNT, "token").read_text(encoding="ascii").strip()
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json", "Content-Type": content_type}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(API + path, data, headers, method=method)
    context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt") if API.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as response:
            return json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        print(f"{method} {path}: {error.code} {error.read().decode(errors='replace')}", file=sys.stderr)
        raise


def version_of(crd: dict[str, Any]) -> tuple[int, ...]:
    """The version of the chart that a CRD comes from. A CRD that names none counts as the oldest."""
    named = (crd["metadata"].get("annotations") or {}).get(VERSION, "")
    return tuple(int(part) for part in re.findall(r"[0-9]+", named)[:3])


def choose_crds(crds: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    """Select the CRDs to apply, each with its live generation. A newer live CRD stays, since another release
    may need it. A missing CRD is left to helm, or to whoever manages the CRDs."""
    chosen = []
    for crd in crds:
        name = crd["metadata"]["name"]
        live = call("GET", f"{CRDS}/{name}")
        if live is None:
            print(f"{name} is not installed: helm install brings it")
            continue
        if version_of(live) > version_of(crd):
            print(f"{name} comes from a newer chart ({live['metadata']['annotations'][VERSION]}): it stays")
            continue
        served = {version["name"] for version in crd["spec"]["versions"]}
        gone = sorted(set(live.get("status", {}).get("storedVersions") or []) - served)
        if gone:
            sys.exit(
                f"{name}: objects may be stored as {', '.join(gone)}, which this chart lacks: migrate them"
            )
        chosen.append((crd, live["metadata"].get("generation")))
    return chosen


def upgrade_crds(folder: str) -> None:
    """Apply all CRDs, or none if the API server refuses one."""
    crds = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("*.json"))]
    chosen = choose_crds(crds)
    has_changed = False
    for dry_run in ("All", ""):
        for crd, generation in chosen:
            query = {"fieldManager": "kintsugi-crds", "force": "true", "dryRun": dry_run}
            used = urllib.parse.urlencode({key: value for key, value in query.items() if value})
            path = f"{CRDS}/{crd['metadata']['name']}?{used}"
            applied = call("PATCH", path, crd, APPLY)
            has_changed |= not dry_run and applied["metadata"].get("generation") != generation
    for crd, _ in chosen:
        print(f"{crd['metadata']['name']} is up to date")
    if has_changed:
        time.sleep(PAUSE_S)


def keep_secret(folder: str, name: str, labels: dict[str, str], data: dict[str, str]) -> None:
    """Create a Secret, or update an existing one to hold `data`. The annotation keeps tools that prune
    what the chart does not render, such as Argo CD, from deleting it."""
    metadata: dict[str, Any] = {"annotations": KEEP, "labels": labels}
    live = call("GET", f"{folder}/{name}")
    if live is None:
        kind = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque"}
        call("POST", folder, {**kind, "metadata": {"name": name, **metadata}, "stringData": data})
        print(f"made Secret {name}")
        return
    held = {key: base64.b64decode(value).decode() for key, value in (live.get("data") or {}).items()}
    annotations = live["metadata"].get("annotations") or {}
    if not (data.items() <= held.items() and KEEP.items() <= annotations.items()):
        call("PATCH", f"{folder}/{name}", {"metadata": metadata, "stringData": data}, MERGE)
        print(f"updated Secret {name}")


def make_token(folder: str, wanted: dict[str, Any]) -> None:
    """Make one Secret with a token for clients and one with its digest for the gateway. Keep a token that
    exists."""
    live = call("GET", f"{folder}/{wanted['client']}") or {}
    kept = (live.get("data") or {}).get("token")
    token = base64.b64decode(kept).decode() if kept else f"kg_{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(token.encode()).hexdigest()
    grant = {"name": wanted["name"], "sha256": digest, "namespaces": wanted["namespaces"]}
    keep_secret(folder, wanted["client"], wanted["labels"], {"token": token})
    # JSON, which is YAML too.
    grants = json.dumps({"tokens": [grant]}, indent=2)
    keep_secret(folder, wanted["gateway"], wanted["labels"], {"tokens.yaml": grants})


def main() -> None:
    action = os.environ["KINTSUGI_ACTION"]
    if action == "crds":
        upgrade_crds(os.environ.get("KINTSUGI_CRDS", "/crds"))
        return
    folder = f"/api/v1/namespaces/{os.environ['KINTSUGI_NAMESPACE']}/secrets"
    tokens = json.loads(os.environ["KINTSUGI_TOKENS"])
    if action == "token":
        make_token(folder, tokens)
        return
    for name in (tokens["client"], tokens["gateway"]):
        call("DELETE", f"{folder}/{name}")


if __name__ == "__main__":
    main()

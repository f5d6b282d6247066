"""The programs that the chart runs in pods, against servers on loopback that answer as the real ones do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.kubernetes.rendering import CHART, HELMS, RELEASE, one, rendered

Answer = tuple[int, Mapping[str, object]]
COMPLETION: dict[str, object] = {"choices": [{"text": " gold"}], "usage": {"completion_tokens": 1}}


@contextmanager
def server(answer: Callable[[str, str, dict[str, str], bytes], Answer]) -> Iterator[str]:
    """Answers (method, path, headers, body) with (status, JSON); its URL."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, document = answer(self.command, self.path, headers, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        do_GET = do_POST = do_PATCH = do_DELETE = respond  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            """Nothing on stderr."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def run(name: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A script as a pod runs it, but with pauses of no length."""
    source = (CHART / "files" / name).read_text()
    assert source.count("PAUSE_S = ") == 1
    source = source.replace("PAUSE_S = 5.0", "PAUSE_S = 0.0").replace("PAUSE_S = 2.0", "PAUSE_S = 0.0")
    command = [sys.executable, "-I", "-c", source]
    environment = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def first_request(url: str, timeout_s: float = 30.0, **env: str) -> subprocess.CompletedProcess[str]:
    values = {
        "URL": url,
        "MODEL": "m",
        "PROMPT": "Kintsugi",
        "TIMEOUT_S": str(timeout_s),
        "NAMESPACE": "acme",
    }
    return run("first_request.py", {f"KINTSUGI_{name}": value for name, value in {**values, **env}.items()})


def test_the_first_request_waits_for_the_gateway_and_carries_its_token() -> None:
    seen: list[tuple[str, str, str | None, str | None, dict[str, object]]] = []

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        shown = headers.get("authorization"), headers.get("x-kintsugi-namespace")
        seen.append((method, path, *shown, json.loads(body)))
        return (503, {"error": "starting"}) if len(seen) < 3 else (200, COMPLETION)

    with server(answer) as url:
        done = first_request(url, TOKEN="kg_secret")
    assert done.returncode == 0, done.stderr
    assert len(seen) == 3
    assert seen[0] == (
        "POST",
        "/v1/completions",
        "Bearer kg_secret",
        "acme",
        {"model": "m", "prompt": "Kintsugi", "max_tokens": 16, "temperature": 0},
    )
    assert "gold" in done.stdout
    assert "kg_secret" not in done.stdout + done.stderr


def test_a_refusal_is_not_waited_for() -> None:
    with server(lambda *_: (401, {"error": {"message": "this token is unknown"}})) as url:
        done = first_request(url)
    assert done.returncode == 1
    assert "401" in done.stderr
    assert "this token is unknown" in done.stderr


def test_nobody_who_answers_is_said_in_the_end() -> None:
    with server(lambda *_: (503, {})) as url:
        pass
    done = first_request(url, timeout_s=0.2)
    assert done.returncode == 1
    assert "did not answer in time" in done.stderr


def remove(api: str, account: Path, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    (account / "token").write_text("pod-token")
    objects = ["blendservices/rag", "corpusprecomputes/manuals"]
    env = {"API": api, "ACCOUNT": str(account), "NAMESPACE": "team", "OBJECTS": json.dumps(objects)}
    return run(
        "remove.py",
        {"TIMEOUT_S": str(timeout_s), **{f"KINTSUGI_{name}": value for name, value in env.items()}},
    )


def test_removal_waits_until_every_object_is_gone(tmp_path: Path) -> None:
    calls: list[tuple[str, str]] = []
    tokens: set[str | None] = set()

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        calls.append((method, path))
        tokens.add(headers.get("authorization"))
        drained = calls.count((method, path)) > 2 or path.endswith("manuals")
        return (200, {}) if method == "DELETE" or not drained else (404, {})

    with server(answer) as url:
        done = remove(url, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = "/apis/kintsugi.dev/v1alpha1/namespaces/team"
    service = f"{folder}/blendservices/rag"
    assert calls[:2] == [("DELETE", service), ("DELETE", f"{folder}/corpusprecomputes/manuals")]
    assert calls.count(("GET", service)) == 3
    assert tokens == {"Bearer pod-token"}


def test_removal_of_what_was_never_made_is_done(tmp_path: Path) -> None:
    with server(lambda *_: (404, {})) as url:
        assert remove(url, tmp_path).returncode == 0


def test_removal_says_what_did_not_go(tmp_path: Path) -> None:
    with server(lambda *_: (200, {})) as url:
        done = remove(url, tmp_path, timeout_s=0.0)
    assert done.returncode == 1
    assert "still there: /apis/kintsugi.dev/v1alpha1/namespaces/team/blendservices/rag" in done.stderr


def test_removal_without_the_right_says_so(tmp_path: Path) -> None:
    with server(lambda *_: (403, {"message": "forbidden"})) as url:
        done = remove(url, tmp_path)
    assert done.returncode != 0
    assert "403" in done.stderr
    assert "forbidden" in done.stderr


def test_pods_get_the_scripts_as_they_are() -> None:
    manifests = rendered(HELMS[1], "multi-tenant")
    for kind, name, file in (
        ("Pod", f"{RELEASE}-first-request", "first_request.py"),
        ("Job", f"{RELEASE}-remove", "remove.py"),
        ("Job", f"{RELEASE}-crds", "prepare.py"),
    ):
        found = one(manifests, kind, name)
        spec = found["spec"]["template"]["spec"] if kind == "Job" else found["spec"]
        (container,) = spec["containers"]
        assert container["args"][0].strip() == (CHART / "files" / file).read_text().strip()
    job = one(manifests, "Job", f"{RELEASE}-remove")["spec"]["template"]["spec"]["containers"][0]
    env = {each["name"]: each["value"] for each in job["env"]}
    assert json.loads(env["KINTSUGI_OBJECTS"]) == [
        f"blendservices/{RELEASE}",
        "corpusprecomputes/search-manuals",
        "corpusprecomputes/support-tickets",
    ]

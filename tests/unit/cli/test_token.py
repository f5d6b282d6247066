from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi.core.errors import Unauthenticated
from kintsugi.store.protocol.access import Caller, TokenFile, Verb

RUNNER = CliRunner()


def test_a_token_is_shown_once_and_opens_what_it_is_bound_to(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    done = RUNNER.invoke(app, ["token", "search", "-n", "search", "-n", "docs/*", "--file", str(file)])
    assert done.exit_code == ExitCode.OK
    token = done.stdout.strip()
    assert token not in file.read_text()
    assert TokenFile(file).caller(token) == Caller("search", ("search", "docs/*"))
    assert "is not printed again" in done.stderr
    done = RUNNER.invoke(app, ["token", "other", "-n", "*", "--file", str(file), "--json"])
    document = json.loads(done.stdout)
    assert document["namespaces"] == ["*"]
    assert TokenFile(file).caller(document["token"]).is_unrestricted
    with pytest.raises(Unauthenticated):
        TokenFile(file).caller("kg_wrong")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "-n", "a b"], "namespaces"),
        (["", "-n", "a"], "name: is required"),
    ],
)
def test_what_cannot_be_bound_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = RUNNER.invoke(app, ["token", *arguments, "--file", str(tmp_path / "tokens.json")])
    assert done.exit_code == ExitCode.BAD_INPUT
    assert message in done.stderr
    assert not (tmp_path / "tokens.json").exists()


def test_a_token_with_verbs_and_an_end_can_be_revoked_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    made = ["token", "ingest", "-n", "docs", "--verb", "put", "--verb", "list", "--file", str(file)]
    done = RUNNER.invoke(app, [*made, "--expires", "2999-01-31T12:00:00Z", "--json"])
    document = json.loads(done.stdout)
    assert document["verbs"] == ["put", "list"]
    assert document["expires"] == "2999-01-31T12:00:00Z"
    caller = TokenFile(file).caller(document["token"])
    assert caller.verbs == {Verb.PUT, Verb.LIST}
    done = RUNNER.invoke(app, ["token", "ingest", "--revoke", "--file", str(file)])
    assert done.exit_code == ExitCode.OK
    assert "revoked" in done.stdout
    with pytest.raises(Unauthenticated, match="revoked"):
        TokenFile(file).caller(document["token"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "namespace: is mandatory"),
        (["-n", "a", "--expires", "soon"], "expires: 'soon' must be a time"),
        (["-n", "a", "--revoke"], "revoke: cannot be combined"),
        (["--revoke"], "no token named 'search'"),
    ],
)
def test_what_makes_no_token_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    file = tmp_path / "tokens.json"
    file.write_text('{"tokens": []}')
    done = RUNNER.invoke(app, ["token", "search", *arguments, "--file", str(file)])
    assert done.exit_code == ExitCode.BAD_INPUT
    assert message in done.stderr
    assert json.loads(file.read_text()) == {"tokens": []}

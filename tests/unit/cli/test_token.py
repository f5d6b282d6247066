from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi.core.errors import Unauthenticated
from kintsugi.gateway.access import Caller, TokenFile

RUNNER = CliRunner()


def test_a_token_is_shown_once_and_opens_what_it_is_bound_to(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    done = RUNNER.invoke(app, ["token", "search", "-n", "search", "-n", "docs/*", "--file", str(file)])
    assert done.exit_code == ExitCode.OK
    token = done.stdout.strip()
    assert token not in file.read_text()
    assert TokenFile(file).caller(token) == Caller("search", ("search", "docs/*"))
    assert "only time" in done.stderr
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
        (["", "-n", "a"], "name: is mandatory"),
    ],
)
def test_what_cannot_be_bound_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = RUNNER.invoke(app, ["token", *arguments, "--file", str(tmp_path / "tokens.json")])
    assert done.exit_code == ExitCode.BAD_INPUT
    assert message in done.stderr
    assert not (tmp_path / "tokens.json").exists()

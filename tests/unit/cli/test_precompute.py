"""What the precompute commands say: signals, failures, progress."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

from kintsugi.cli.commands import precompute as command
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import UnknownField
from kintsugi.precompute.progress import Progress, State
from kintsugi.precompute.sources.readers import Columns, Failure


class StubJob:
    """Counts how often it is cancelled."""

    cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


def test_the_first_ctrl_c_waits_and_says_so_and_the_second_does_not_wait() -> None:
    job, notes = StubJob(), list[str]()
    before = signal.getsignal(signal.SIGINT)
    with command._cancel_on_signals(job, notes.append):  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)
        assert job.cancelled == 1
        assert "after the running batches" in notes[0]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("failure", "place"),
    [
        (Failure("file:///c/a.jsonl", 70, "bad"), "/c/a.jsonl@70"),
        (Failure("file:///c/a.csv", 2, "bad", "d2"), "/c/a.csv@2 (d2)"),
        (Failure("s3://c/deep/a.txt", 0, "bad", "deep/a.txt"), "s3://c/deep/a.txt"),
        (Failure("", 0, "bad", "chunk 00ff"), "chunk 00ff"),
    ],
)
def test_a_failure_says_where_to_look(failure: Failure, place: str) -> None:
    assert command._locate(failure) == place


def test_the_final_table_names_some_failures_and_counts_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(
        corpus="tea",
        state=State.DONE,
        documents=5,
        documents_failed=3,
        failures=[Failure("file:///a", 0, "bad")],
        files_left_out=30,
        left_out=[Failure(f"file:///{number}.png", 0, "is not text", left_out=True) for number in range(30)],
    )
    command._report(Screen(as_json=False), progress, None, 1)
    said = capsys.readouterr().out
    assert "failed: /a: bad" in said
    assert "failed: 2 more" in said
    assert "left out: /0.png: is not text" in said
    assert said.rstrip().endswith("left out: 10 more")


def test_a_dry_run_shows_what_is_missing_rather_than_a_rate_of_nothing() -> None:
    assert command._format_progress(Progress(dry=True, bytes_missing=2 << 20)).endswith("2 MiB missing")
    assert "tokens/s" in command._format_progress(Progress())


def test_until_the_first_batch_is_done_no_share_of_nothing_is_shown() -> None:
    progress = Progress(documents=3, chunks=9, chunks_missing=9, share_read=0.1)
    says = command._format_progress(progress)
    assert (
        says == "the engine starts and prefills its first batch; 3 documents read, 9 chunks, 0 hits skipped"
    )
    progress.chunks_filled = 3
    assert command._format_progress(progress).startswith("3%, 3 documents")


def test_a_dry_run_says_which_share_is_resident_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(corpus="tea", dry=True, chunks=4, chunks_resident=3, tiers={"ram": 1, "ssd0": 2})
    command._report(Screen(as_json=False), progress, None, 1)
    rows = [line.split() for line in capsys.readouterr().out.replace("│", " ").splitlines()]
    assert ["in", "ram", "1"] in rows
    assert ["in", "ssd0", "2"] in rows
    assert ["resident", "now", "75.0%"] in rows


def test_columns_are_named_one_by_one() -> None:
    assert command.parse_columns("") == Columns()
    assert command.parse_columns("text=body, id=key") == Columns(text="body", id="key")
    with pytest.raises(UnknownField, match="columns"):
        command.parse_columns("body=text")

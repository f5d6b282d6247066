"""What the figures of the documentation count."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.docs import README_WORDS_MAX, REPOSITORY, SHOWN_MAX, count, count_words

PAGE = "# A title\n\n| a | b |\n|---|---|\n```console\n$ run  --it\n```\n– a [link](x.md#y)\u00a0and more\n"


@pytest.mark.parametrize("text", ["", "one", PAGE])
def test_words_are_those_of_wc(tmp_path: Path, text: str) -> None:
    path = tmp_path / "README.md"
    path.write_text(text, encoding="utf-8")
    environment = {"LC_ALL": "C.UTF-8"}
    said = subprocess.run(["wc", "-w", path], env=environment, capture_output=True, text=True, check=True)
    assert count_words(path).value == int(said.stdout.split()[0])


@pytest.mark.parametrize(("beyond", "holds"), [(0, True), (1, False)])
def test_the_bar_of_the_readme(tmp_path: Path, beyond: int, holds: bool) -> None:
    path = tmp_path / "README.md"
    path.write_text("word " * (README_WORDS_MAX + beyond))
    figure = count_words(path)
    assert (figure.name, figure.value, figure.holds) == ("readme_words", README_WORDS_MAX + beyond, holds)


def test_the_readme_keeps_within_its_bar() -> None:
    assert count_words(REPOSITORY / "README.md").holds


def test_what_is_found_is_counted_and_the_first_are_shown() -> None:
    found = [f"page-{number}" for number in range(SHOWN_MAX + 2)]
    figure = count("docs_broken_links", found)
    assert (figure.value, figure.holds) == (len(found), False)
    assert figure.detail.endswith("page-4 and 2 more")
    assert count("docs_broken_links", []).holds

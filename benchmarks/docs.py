"""The README's length, broken links of the documentation, and public names without a sentence.

Usage: python benchmarks/docs.py [--save]

`readme_words` counts the words of the whole README as `wc -w` does. `docs_broken_links` counts links between
the repository's Markdown files, and within the site, that lead nowhere; links to other hosts are not
followed. The site is built first (`make docs`): one of earlier documents would say nothing.
`docs_undocumented_public` counts names of the SDK, options of commands, settings, metrics, fields of CRDs and
chart values that have no sentence. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support.figures import Figure, report

REPOSITORY = Path(__file__).parent.parent
SITE = Path("build/site")
README_WORDS_MAX = 900
SHOWN_MAX = 5
"""Names that a figure's detail shows."""


def listed(*arguments: str) -> list[str]:
    """The JSON array that a script of the repository prints."""
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    names: list[str] = json.loads(ran.stdout)
    return names


def count(name: str, found: list[str]) -> Figure:
    """A figure that must be 0, with the first of what it counts."""
    more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
    return Figure.at_most(name, len(found), 0, "", "; ".join(found[:SHOWN_MAX]) + more)


def count_words(readme: Path) -> Figure:
    """The length of the README, code and tables included."""
    words = len(readme.read_text(encoding="utf-8").split())
    return Figure.at_most("readme_words", words, README_WORDS_MAX, "words")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    given = parser.parse_args()
    subprocess.run(["make", "docs"], cwd=REPOSITORY, stdout=sys.stderr, check=True)
    links = count("docs_broken_links", listed("scripts/links.py", "--site", str(SITE), "--json"))
    undocumented = count("docs_undocumented_public", listed("-m", "scripts.reference", "--undocumented"))
    figures = [count_words(REPOSITORY / "README.md"), links, undocumented]
    report("docs", {"site": str(SITE)}, figures, "docs" if given.save else None)


if __name__ == "__main__":
    main()

"""Generated documents of twelve kinds, from prose to runs of blank lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

WORDS = (
    "keeper",
    "light",
    "salt",
    "harbour",
    "tide",
    "copper",
    "furnace",
    "ledger",
    "retry",
    "price",
    "bridge",
)


def _words(random: Random, most: int) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, most)))


def _sentence(random: Random) -> str:
    return _words(random, 18).capitalize() + random.choice(".?!")


def _paragraph(random: Random) -> str:
    return random.choice((" ", "  ")).join(_sentence(random) for _ in range(random.randint(2, 9)))


def _prose(random: Random) -> str:
    return "\n\n".join(_paragraph(random) for _ in range(8))


def _markdown(random: Random) -> str:
    return "".join(
        f"{'#' * random.randint(1, 3)} {_sentence(random)}\n\n{_paragraph(random)}\n\n"
        f"- {_sentence(random)}\n  - {_sentence(random)}\n\n"
        for _ in range(8)
    )


def _table(random: Random) -> str:
    rows = (f"| KB-{random.randint(1, 999)} | {_sentence(random)} | 29.00 EUR |\n" for _ in range(60))
    return "| article | name | price |\n|---|---|---|\n" + "".join(rows)


def _code(random: Random) -> str:
    return "".join(
        f"class Retry{number}:\n    def attempt(self, call):\n        if call.{random.choice(WORDS)}:\n"
        f"            return self.again(call, {number})\n\n"
        for number in range(40)
    )


def _json(random: Random) -> str:
    rows = [{word: _sentence(random) for word in random.sample(WORDS, 4)} for _ in range(20)]
    return json.dumps(rows, indent=2)


def _csv(random: Random) -> str:
    return "".join(",".join(random.choices(WORDS, k=8)) + "\n" for _ in range(100))


def _chinese(random: Random) -> str:
    characters = [chr(point) for point in range(0x4E00, 0x4E80)]
    return "".join(
        "".join(random.choices(characters, k=random.randint(5, 25))) + random.choice("。？！\n\u3000")
        for _ in range(80)
    )


def _emoji(random: Random) -> str:
    return " ".join(random.choices(["🎉", "👩\u200d👩\u200d👧", "🏽", "e\u0301", "naïve", "漢", "ok"], k=600))


def _crlf(random: Random) -> str:
    return _prose(random).replace("\n", "\r\n")


def _tabs(random: Random) -> str:
    return "".join("\t" * random.randint(0, 4) + f"{_sentence(random)}\tend\n" for _ in range(60))


def _long_line(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=1_200))


def _blank_runs(random: Random) -> str:
    def run() -> str:
        return random.choice(("\n" * random.randint(1, 60), " " * random.randint(1, 200), " \n\t\n"))

    return run() + "".join(_sentence(random) + run() for _ in range(30))


KINDS: dict[str, Callable[[Random], str]] = {
    "prose": _prose,
    "markdown": _markdown,
    "table": _table,
    "code": _code,
    "json": _json,
    "csv": _csv,
    "chinese": _chinese,
    "emoji": _emoji,
    "crlf": _crlf,
    "tabs": _tabs,
    "long line": _long_line,
    "blank runs": _blank_runs,
}

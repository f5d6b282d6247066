"""A page of the reference: sections of entries, each with a sentence, and their form in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One public thing: an option, a setting, a metric, a field."""

    name: str
    sentence: str
    """The meaning; empty: the code does not state it."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further columns, as Markdown, by their titles."""


@dataclass(frozen=True)
class Section:
    """Entries under one heading."""

    title: str
    sentence: str
    entries: Sequence[Entry] = ()
    noun: str = "name"
    """Title of the first column."""


@dataclass(frozen=True)
class Page:
    """A page of the reference."""

    path: str
    """Relative to the site's folder of pages."""
    title: str
    about: str
    sections: Sequence[Section]

    def undocumented(self) -> Iterator[str]:
        """Yield the titles of sections and entries that lack a sentence."""
        for section in self.sections:
            if not section.sentence:
                yield f"{self.title}: {section.title}"
            for entry in section.entries:
                if not entry.sentence.strip():
                    yield f"{self.title}: {section.title}: {entry.name}"

    def markdown(self) -> str:
        parts = [f"# {self.title}", self.about]
        for section in self.sections:
            parts += [f"## {section.title}", section.sentence]
            if section.entries:
                parts.append(table_of(section))
        return "\n\n".join(part for part in parts if part) + "\n"


def table_of(section: Section) -> str:
    """A table of the section's entries, without columns that are empty in every row."""
    titles = list(dict.fromkeys(title for entry in section.entries for title in entry.facts))
    titles = [title for title in titles if any(entry.facts.get(title) for entry in section.entries)]
    rows = [[section.noun, *titles, "meaning"]]
    rows += [
        [code(entry.name), *(entry.facts.get(title, "") for title in titles), _escape(entry.sentence)]
        for entry in section.entries
    ]
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(map(_escape_pipes, line)) + " |" for line in lines)


def code(text: object) -> str:
    """The text as inline code."""
    shown = str(text)
    fence = "``" if "`" in shown else "`"
    return f"{fence}{shown}{fence}"


def one_of(values: Iterable[object]) -> str:
    """Allowed values, as inline code."""
    return ", ".join(map(code, values))


def _escape_pipes(cell: str) -> str:
    """Escape pipes, except in inline code, where the site's Markdown would show the backslash."""
    parts = cell.split("`")
    return "`".join(part if index % 2 else part.replace("|", "\\|") for index, part in enumerate(parts))


def _escape(text: str) -> str:
    """Return a sentence for a table's cell, on one line. Escapes `<` except in inline code."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))

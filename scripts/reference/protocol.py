"""The protocol's page, from the .proto files and their comments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.reference.page import Entry, Page, Section, code

FOLDER = Path(__file__).parents[2] / "proto/kintsugi/rpc/v1"

_OPENS = re.compile(r"(service|message|enum|oneof)\s+(\w+)\s*\{(\})?")
_RPC = re.compile(r"rpc\s+(\w+)\s*\(\s*(.*?)\s*\)\s*returns\s*\(\s*(.*?)\s*\)")
_FIELD = re.compile(r"(?:(repeated|optional)\s+)?([\w.]+|map<[^>]*>)\s+(\w+)\s*=\s*(\d+)")
_VALUE = re.compile(r"(\w+)\s*=\s*(\d+)\s*;")


@dataclass
class _Block:
    kind: str
    name: str
    comment: str
    entries: list[Entry] = field(default_factory=list)


def page() -> Page:
    """Fields whose name says everything have no comment; every service, message and RPC is listed."""
    sections = []
    for path in sorted(FOLDER.glob("*.proto")):
        blocks = list(_blocks(path.read_text().splitlines()))
        for block in blocks:
            title = f"{block.kind} {block.name}"
            noun = {"service": "call", "enum": "value"}.get(block.kind, "field")
            sections.append(
                Section(f"{path.stem}: {title}", block.comment, block.entries, noun, must_be_described=False)
            )
    about = (
        "The gRPC services, generated from `proto/kintsugi/rpc/v1`. Clients of a gateway speak "
        "`kintsugi.rpc.v1.Kintsugi`; the others are spoken between the parts of a service."
    )
    return Page("reference/protocol.md", "Protocol", about, sections)


def _blocks(lines: list[str]) -> Iterator[_Block]:
    """Services, messages and enums; the fields of a oneof are those of its message."""
    open_blocks: list[_Block] = []
    comment: list[str] = []
    for line in map(str.strip, lines):
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        said, comment = " ".join(comment), []
        if opened := _OPENS.match(line):
            outer = ".".join(one.name for one in open_blocks if one.kind == "message")
            kind, name = opened[1], opened[2]
            block = _Block(kind, f"{outer}.{name}" if outer and kind != "oneof" else name, said)
            if opened[3]:
                yield block
            else:
                open_blocks.append(block)
        elif line.startswith("}") and open_blocks:
            closed = open_blocks.pop()
            if closed.kind == "oneof":
                open_blocks[-1].entries += [_in_oneof(one, closed.name) for one in closed.entries]
            else:
                yield closed
        elif open_blocks and (entry := _entry(open_blocks[-1].kind, line, said)):
            open_blocks[-1].entries.append(entry)


def _in_oneof(entry: Entry, oneof: str) -> Entry:
    return Entry(entry.name, entry.sentence, {**entry.facts, "one of": code(oneof)})


def _entry(kind: str, line: str, said: str) -> Entry | None:
    if kind == "service" and (rpc := _RPC.match(line)):
        return Entry(rpc[1], said, {"takes": code(rpc[2]), "gives": code(rpc[3])})
    if kind == "enum" and (value := _VALUE.match(line)):
        return Entry(value[1], said, {"number": value[2]})
    if kind in ("message", "oneof") and (found := _FIELD.match(line)):
        shown = f"{found[1]} {found[2]}" if found[1] else found[2]
        return Entry(found[3], said, {"type": code(shown), "number": found[4]})
    return None

"""Fail when a function or a file outgrows its limit: `python scripts/ratchet.py [FOLDER ...]`.

Limits only ever go down. A function is measured from its first statement after the docstring to its
last line, so long signatures and good docstrings cost nothing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 600

FOLDERS = ("services", "operators", "tests", "benchmarks", "scripts")
GENERATED = Path("services/kintsugi/rpc")


@dataclass(frozen=True)
class Excess:
    """A function or file that exceeds its limit."""

    path: Path
    line: int
    what: str
    lines: int
    lines_max: int

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.what} has {self.lines} lines, at most {self.lines_max} allowed"
        )


def excesses_of(path: Path, source: str) -> Iterator[Excess]:
    """Yield everything in one file that is too long, in order."""
    num_lines = source.count("\n")
    if num_lines > FILE_LINES_MAX:
        yield Excess(path, 1, "file", num_lines, FILE_LINES_MAX)
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = body_lines(node)
            if lines > FUNCTION_LINES_MAX:
                yield Excess(path, node.lineno, f"function {node.name}", lines, FUNCTION_LINES_MAX)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of lines of a function's statements, without its docstring."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not statements:
        return 0
    return (statements[-1].end_lineno or 0) - statements[0].lineno + 1


def sources(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if not path.is_relative_to(GENERATED):
                yield path


def main() -> int:
    folders = [Path(name) for name in sys.argv[1:] or FOLDERS]
    excesses = [excess for path in sources(folders) for excess in excesses_of(path, path.read_text())]
    for excess in excesses:
        print(excess)
    return 1 if excesses else 0


if __name__ == "__main__":
    sys.exit(main())

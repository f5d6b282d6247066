"""The command line's page, from the app object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from scripts.reference.page import Entry, Page, Section, code

from kintsugi.cli.main import app
from tests.unit.surface import command_line


def page() -> Page:
    root = typer.main.get_command(app)
    return Page(
        "reference/cli.md",
        "Command line",
        "Every command takes `--help`, and `--json`, which prints only JSON on stdout. "
        + str(getattr(root, "epilog", "") or ""),
        [*_commands(root, "kintsugi"), _operator()],
    )


def _commands(command: Any, path: str) -> Iterator[Section]:
    inner = getattr(command, "commands", {})
    entries = [_entry(one, position) for position, one in enumerate(command.params) if not _is_common(one)]
    if not inner or entries:
        yield Section(path, _sentence(command), entries, "option")
    for name in sorted(inner):
        yield from _commands(inner[name], f"{path} {name}")


def _is_common(parameter: Any) -> bool:
    return getattr(parameter, "hidden", False) or bool(
        {"--help", "--json", "--install-completion", "--show-completion"} & {*parameter.opts}
    )


def _entry(parameter: Any, position: int) -> Entry:
    facts = command_line._parameter(parameter)
    is_argument = not any(name.startswith("-") for name in parameter.opts)
    name = parameter.name.upper() if is_argument else " ".join([*parameter.opts, *parameter.secondary_opts])
    return Entry(
        name,
        str(parameter.help or ""),
        {"type": code(facts["type"]), "default": _default(facts)},
    )


def _default(facts: dict[str, Any]) -> str:
    if facts["required"]:
        return "required"
    default = facts["default"]
    return "" if default in (None, "", False) else code(default)


def _sentence(command: Any) -> str:
    return " ".join(str(command.help or "").split())


def _operator() -> Section:
    entries = []
    for action in command_line._operator_parser()._actions:
        if "--help" not in action.option_strings:
            facts = command_line._option(action)
            shown = "" if facts["default"] in (None, "", False) else code(facts["default"])
            entries.append(
                Entry(
                    " ".join(action.option_strings),
                    str(action.help or "") % {"default": action.default},
                    {"type": code(facts["type"]), "default": shown},
                )
            )
    return Section(
        "kintsugi-operator", "Runs the Kubernetes operator until it is stopped.", entries, "option"
    )

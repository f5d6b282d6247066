"""`kintsugi status`: shows a running service, and what would improve it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.screen import Screen
from kintsugi.cli.service.facts import Contact, ServiceFacts, ServiceLink, ask_service
from kintsugi.cli.service.status import ServiceStatus, describe_status


def run(screen: Screen, link: ServiceLink) -> ExitCode:
    """Show the status. Returns `UNAVAILABLE` if no gateway or no engine answers, `BAD_INPUT` if the gateway
    rejects the caller's token."""
    facts = ask_service(link)
    status = describe_status(facts)
    screen.show(status_document(facts, status), lambda console: _render(console, status))
    if facts.contact is Contact.UNAUTHENTICATED:
        return ExitCode.BAD_INPUT
    return ExitCode.OK if status.running else ExitCode.UNAVAILABLE


def status_document(facts: ServiceFacts, status: ServiceStatus) -> dict[str, Any]:
    """JSON form: the status, and under `facts` the facts that it was derived from."""
    return {**asdict(status), "runs": dict(status.runs), "facts": asdict(facts)}


def _render(console: Console, status: ServiceStatus) -> None:
    state = (
        "runs" if status.running else "is not ready" if status.contact == "answered" else "does not answer"
    )
    console.print(Text(f"{status.url} {state}", style="bold"))
    lines = [*status.runs]
    if status.blending:
        lines.append(("blending", status.blending))
    if status.why_not:
        lines.append(("not blended", " · ".join(status.why_not)))
    for part, detail in lines:
        console.print(Text(f"  {part:<12}", style="dim") + Text(detail), soft_wrap=True)
    if status.helps:
        console.print(Text("What would help", style="bold"))
        for help_text in status.helps:
            console.print(Text(f"  {help_text}"), soft_wrap=True)

"""The commands of `kintsugi`. The module of the same name in `cli.commands` implements a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kintsugi import __version__
from kintsugi.cli.commands.keys import app as keys_app
from kintsugi.cli.commands.size import size
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.extras import ENGINE, PRECOMPUTE, SERVING, SERVING_HERE, STORE, add_missing_command
from kintsugi.cli.options import CalibrateTask, EvaluateTask, GenerateTask, Model, ServeTask
from kintsugi.cli.runner import command
from kintsugi.cli.screen import Screen
from kintsugi.cli.service_facts import ServiceLink
from kintsugi.core.errors import InvalidField
from kintsugi.models.reference import REFERENCE
from kintsugi.store.protocol.access import Verb

EXIT_CODES = (
    "Exit codes: 0 success · 1 unexpected failure · 2 bad input · 3 not blendable, or the self-test failed · "
    "4 engine or store unavailable · 5 data corrupted or from another version · 130 interrupted."
)

app = typer.Typer(
    name="kintsugi",
    help="Answer questions over chunks whose KV cache is stored: CacheBlend on unmodified vLLM.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit(ExitCode.OK)


@command(app)
def demo(
    screen: Screen,
    model: Model = REFERENCE.name,
    open_console: Annotated[
        bool, typer.Option("--open", help="Then serve the model, and open the console in a browser.")
    ] = False,
) -> None:
    """Answer one question from six passages in four ways; compare the answers and times to first token."""
    ENGINE.check("demo")
    from kintsugi.cli.commands.demo import run

    run(screen, model, open_console)


@command(app)
def generate(screen: Screen, task: GenerateTask) -> ExitCode:
    """Answer a question over text files by blending, and print the cost."""
    ENGINE.check("generate")
    from kintsugi.cli.commands.generate import run

    return run(screen, task)


@command(app)
def doctor(
    screen: Screen,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint with which an engine is started and runs its self-test.")
    ] = None,
) -> ExitCode:
    """Check whether this installation can blend, and with --model whether a model can."""
    if model is not None:
        ENGINE.check("doctor --model")
    from kintsugi.cli.commands.doctor import run

    return run(screen, model)


@command(app)
def status(screen: Screen, link: ServiceLink) -> ExitCode:
    """Show what a service runs, what it blends, why not, and what would help."""
    from kintsugi.cli.commands.status import run

    return run(screen, link)


@command(app)
def calibrate(screen: Screen, task: CalibrateTask) -> ExitCode:
    """Measure the quality of a model's blended answers, and write the report that permits blending."""
    ENGINE.check("calibrate")
    from kintsugi.cli.commands.calibrate import run

    return run(screen, task)


@command(app, "eval")
def evaluate(screen: Screen, task: EvaluateTask) -> int | None:
    """Compare blended answers with those of full prefill by quality, cost and time."""
    ENGINE.check("eval")
    from kintsugi.cli.commands.evaluate import run

    error = run(screen, task).error
    return None if error is None else error["exit_code"]


@command(app)
def token(
    screen: Screen,
    name: Annotated[str, typer.Argument(help="Name of the caller, in logs and for --revoke.")],
    *,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace", "-n", help="Namespace that the caller may use, or a prefix and *; repeat."
        ),
    ] = None,
    file: Annotated[Path, typer.Option(help="The gateway's tokens file; created if missing.")],
    verb: Annotated[
        list[Verb] | None,
        typer.Option(help="Permission of the caller; repeat. Default: generate, put, delete and list."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Time at which the token expires, such as 2027-01-31T12:00:00Z.")
    ] = None,
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Revoke the token instead of creating one.")
    ] = False,
) -> None:
    """Create a bearer token for a gateway. It is printed only once; the file stores its hash."""
    from kintsugi.gateway.access import add_grant, new_token, revoke_grant

    if revoke:
        if namespace or verb or expires:
            raise InvalidField("revoke", "cannot be combined with --namespace, --verb and --expires")
        revoke_grant(file, name)
        revoked = {"name": name, "revoked": True, "file": str(file)}
        screen.show(revoked, f"the token of {name} is revoked")
        return
    if not namespace:
        raise InvalidField("namespace", "is mandatory: pass --namespace, and repeat it for several")
    text, grant = new_token(name, namespace, verb, expires)
    add_grant(file, grant)
    document = {"token": text, "name": name, "namespaces": namespace, "file": str(file)}
    if verb:
        document["verbs"] = list(verb)
    if expires:
        document["expires"] = expires
    screen.show(document, text)
    screen.note(f"{file} stores only the token's hash; the token is not printed again")


@command(app)
def serve(screen: Screen, task: ServeTask) -> ExitCode:
    """Serve a model with a chunk store and a gateway on this machine until interrupted."""
    (SERVING if task.print_config else SERVING_HERE).check("serve")
    from kintsugi.cli.commands.serve import run

    return run(screen, task)


command(app)(size)
app.add_typer(keys_app, name="keys")

# The modules of these commands define their options, and import libraries of an extra.
if STORE.missing:
    for each in ("store", "backup", "restore"):
        add_missing_command(app, each, STORE)
else:
    from kintsugi.cli.commands.backup import backup, restore
    from kintsugi.cli.commands.store import app as store_app

    app.add_typer(store_app, name="store")
    command(app)(backup)
    command(app)(restore)

if PRECOMPUTE.missing:
    add_missing_command(app, "precompute", PRECOMPUTE)
else:
    from kintsugi.cli.commands.precompute import app as precompute_app

    app.add_typer(precompute_app, name="precompute")

"""The console script `kintsugi`. The SDK installs it; the extra `cli` installs the libraries that it
needs."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from kintsugi.cli.exits import ExitCode

MODULES = ("cryptography", "jinja2", "rich", "typer")


def main() -> None:
    """Run the command line. If its libraries are missing, print what to install. A signal while modules are
    imported, and an error of the operating system that no command expects, print one line, too."""
    _open_streams()
    try:
        _run()
    except KeyboardInterrupt:
        print("kintsugi: interrupted", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
            raise
        place = error.filename or "the output or a file"
        print(f"kintsugi: {place} cannot be read or written ({error.strerror})", file=sys.stderr)
        # What is buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILURE)


def _run() -> None:
    if missing := [name for name in MODULES if find_spec(name) is None]:
        print(
            f"error: kintsugi needs modules that are not installed ({', '.join(missing)}): "
            "pip install 'kintsugi-kv[cli]'",
            file=sys.stderr,
        )
        sys.exit(ExitCode.UNAVAILABLE)
    from kintsugi.cli.main import app

    try:
        app()
    finally:
        sys.stdout.flush()


def _open_streams() -> None:
    """Make stdout and stderr usable. The number of a closed one would be that of the next file that is
    opened, and an encoding such as ASCII would raise an error for a tick."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]

"""The console script `kintsugi`. The SDK installs it; the extra `cli` installs the libraries that it
needs."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from kintsugi.cli.exits import ExitCode

MODULES = ("cryptography", "jinja2", "rich", "typer")


def main() -> None:
    """Run the command line. If its libraries are missing, print what to install."""
    if missing := [name for name in MODULES if find_spec(name) is None]:
        print(
            f"error: kintsugi needs modules that are not installed ({', '.join(missing)}): "
            "pip install 'kintsugi-kv[cli]'",
            file=sys.stderr,
        )
        sys.exit(ExitCode.UNAVAILABLE)
    from kintsugi.cli.main import app

    app()

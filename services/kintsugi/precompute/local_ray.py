"""Starts a Ray that only this user of this machine can reach, and joins a running Ray.

Every client that reaches Ray's ports can run code in its workers. By default, Ray 2.60 replaces a loopback
address by the machine's own, so that its processes listen on every interface. It stores its authentication
token in a file that every user may read, and its logs and sockets in folders that every user may write to.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from kintsugi.core.deploy import RAY_ENVIRONMENT

LOOPBACK = "127.0.0.1"
TEMPORARY = Path("/tmp")
"""Ray's default, independent of `TMPDIR`: paths of sockets have at most 107 characters."""
TOKEN_BYTES = 32
UNREAD = {
    "RAY_event_stats": "false",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "false",
}
"""Settings that turn off Ray's statistics for its dashboard, for `ray list` and for its own metrics, which
nothing reads here. Values in the environment take precedence."""
ANSWER_S = 2.0
"""Timeout of a connection within this machine."""


def start_local_ray(**options: Any) -> None:
    """Start Ray in this process, with further options of `ray.init`. Raises what `ray.init` raises.

    It listens on loopback only and requires a token: `RAY_AUTH_TOKEN` or the file `RAY_AUTH_TOKEN_PATH`, else
    the file `~/.ray/auth_token`, which Ray's own commands read and which is created if it does not exist.
    `RAY_AUTH_MODE=disabled` turns tokens off. Logs are in a folder of this user, in `RAY_TMPDIR` if it is
    set.
    """
    import ray

    require_token()
    for name, value in {**RAY_ENVIRONMENT, **UNREAD}.items():
        os.environ.setdefault(name, value)
    # Ray makes its temporary folder writable for all users, so it lies inside a private folder.
    options["_temp_dir"] = str(make_private_folder(Path(os.environ.get("RAY_TMPDIR") or TEMPORARY)) / "ray")
    with _keep_loopback(), _leave_out_log_monitor(), _leave_out_messages():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=LOOPBACK,
            **options,
        )


def join_ray(address: str) -> None:
    """Join the Ray at `address`, which must also be the value of `RAY_ADDRESS`. Raises what `ray.init`
    raises.

    A Ray that `start_local_ray` started in another process is joined at its loopback address.
    """
    import ray

    with _keep_loopback() if is_on_loopback_alone(address) else nullcontext():
        ray.init(log_to_driver=False, logging_level="ERROR")


def is_on_loopback_alone(address: str) -> bool:
    """Whether a process listens at this `host:port` of the loopback interface and none listens at the same
    port of the machine's own address."""
    from ray._private.services import node_ip_address_from_perspective

    host, _, port = address.rpartition(":")
    if host not in ("localhost", LOOPBACK) or not port.isdecimal():
        return False
    return _is_answered(LOOPBACK, int(port)) and not _is_answered(
        node_ip_address_from_perspective(), int(port)
    )


def _is_answered(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except (OSError, OverflowError):
        return False
    return True


@contextmanager
def _keep_loopback() -> Iterator[None]:
    """Make Ray keep a loopback address. Ray alone keeps one only on systems without support for clusters
    (`services.get_node_ip_address`)."""
    from ray._private import ray_constants

    supported = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = supported


@contextmanager
def _leave_out_log_monitor() -> Iterator[None]:
    """Start Ray without its log monitor, for which Ray has no option. The monitor reads all logs ten times a
    second for drivers that print them, and `log_to_driver` turns that off."""
    from ray._private.node import Node

    start = Node.start_log_monitor
    Node.start_log_monitor = lambda node: None
    try:
        yield
    finally:
        Node.start_log_monitor = start


@contextmanager
def _leave_out_messages() -> Iterator[None]:
    """Start Ray without the thread that prints Ray's messages about dead workers to stdout, which is reserved
    for a command's result. Ray has no option for it. `serving.deaths` and `precompute.pool` report deaths."""
    from ray._private import worker

    listen = worker.listen_error_messages
    worker.listen_error_messages = lambda *_: None
    try:
        yield
    finally:
        worker.listen_error_messages = listen


def require_token() -> None:
    """Turn Ray's token authentication on, unless `RAY_AUTH_MODE` is set."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # reads the environment again
    if os.environ["RAY_AUTH_MODE"].lower() != "token":
        return
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        try:
            make_token_file(Path.home() / ".ray" / "auth_token")
        except (OSError, RuntimeError):  # no writable home: only processes started here know the token
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(TOKEN_BYTES)
    AuthenticationTokenLoader.instance().reset_cache()


def make_token_file(path: Path) -> None:
    """Create a token if the file does not exist. Only its owner may read it. Raises `OSError`."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
    if path.stat().st_uid == os.getuid():
        path.chmod(0o600)


def make_private_folder(parent: Path) -> Path:
    """Return a folder that only this user may enter. It is the same at each start, unless another user has
    created a folder of its name."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"kintsugi-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        folder.chmod(0o700)
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=parent))

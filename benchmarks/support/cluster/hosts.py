"""Hosts in namespaces of one Linux machine: each has its own network, processes, mounts and host name.

All hosts are connected by a bridge in the network namespace of this process. `enter_namespaces` gives that
process namespaces of its own, too: when it ends, however it ends, the kernel ends every process of every host
and removes all links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

BRIDGE = "br0"
NETWORK = "10.99.0"
SWITCH = f"{NETWORK}.1"
"""Address of this process, where clients and Redis run."""
INSIDE = "KINTSUGI_BED_INSIDE"
UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts")
TOOLS = ("unshare", "nsenter", "ip", "tc")
SHARED_MEMORY = "768m"
START_S = 10.0
INIT = """
set -e
mount -t tmpfs -o size=$4 tmpfs /dev/shm
mount --bind "$1" "$2"
mount --bind "$5" /etc/hosts
hostname "$3"
ip link set lo up
echo ready
while :; do sleep 3600 & wait $!; done
"""
"""The first process of a host. It adopts and reaps orphans, as bash does."""


def why_not() -> str:
    """Return why hosts cannot be made here; empty if they can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} missing; install iproute2 and util-linux"
    return "" if os.geteuid() == 0 else "network namespaces need root"


def enter_namespaces() -> None:
    """Run this program again as the first process of its own namespaces, unless it is that already."""
    if os.environ.pop(INSIDE, None) is None:
        os.environ[INSIDE] = "1"
        os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, *sys.argv])
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{SWITCH}/24", "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Host:
    """A host, from `boot` until `kill`. It can boot again, with its address and its disk."""

    def __init__(self, name: str, number: int, disk: Path, place: Path, names: Path) -> None:
        """``disk``: the host's folder, which its processes see at ``place``, as all hosts do. ``names``: the
        file that all hosts see as /etc/hosts."""
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self._link = f"v{number}"
        self._disk, self._place, self._names = disk, place, names
        self._unshared: subprocess.Popen[str] | None = None
        self._init = 0

    @property
    def is_up(self) -> bool:
        return self._unshared is not None

    def boot(self) -> None:
        self._disk.mkdir(exist_ok=True)
        values = (self._disk, self._place, self.name, SHARED_MEMORY, self._names)
        script = ["bash", "-c", INIT, "init", *map(str, values)]
        unshared = subprocess.Popen([*UNSHARE, *script], stdout=subprocess.PIPE, text=True)
        assert unshared.stdout is not None
        if unshared.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{self.name} does not boot")
        children = Path(f"/proc/{unshared.pid}/task/{unshared.pid}/children").read_text()
        self._unshared, self._init = unshared, int(children.split()[0])
        peer = ("type", "veth", "peer", "name", "eth0", "netns", str(self._init))
        _run("ip", "link", "add", self._link, *peer)
        _run("ip", "link", "set", self._link, "master", BRIDGE, "up")
        self._net("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self._net("ip", "link", "set", "eth0", "up")
        self._net("ip", "route", "add", "default", "via", SWITCH)

    def kill(self) -> None:
        """End all processes at once, as a power cut does: no connection is closed."""
        if self._unshared is None:
            return
        self._unshared.kill()
        self._unshared.wait()
        self._unshared = None
        # The kernel removes the namespace, and so the link, when the last process is gone.
        deadline_s = time.monotonic() + START_S
        while Path(f"/sys/class/net/{self._link}").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        subprocess.run(["ip", "link", "del", self._link], capture_output=True)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process on the host; its output is appended to ``log``."""
        enter = ("nsenter", "-t", str(self._init), "--net", "--pid", "--mount", "--uts")
        with log.open("ab") as output:
            return subprocess.Popen(
                [*enter, *command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def titles(self) -> Iterator[str]:
        """Yield the command line of each process of the host."""
        mine = os.readlink(f"/proc/{self._init}/ns/net")
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(process / "ns/net") == mine:
                    yield (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended
                continue

    def cut_off(self) -> None:
        """Pull the cable: packets in both directions are lost."""
        _run("ip", "link", "set", self._link, "down")

    def reconnect(self) -> None:
        _run("ip", "link", "set", self._link, "up")

    def slow_down(self, rate: str) -> None:
        """Limit what the host sends, such as `2mbit`."""
        self._net(*f"tc qdisc replace dev eth0 root tbf rate {rate} burst 16kb latency 500ms".split())

    def speed_up(self) -> None:
        self._net("tc", "qdisc", "del", "dev", "eth0", "root")

    def drop(self, other: Host, port: int) -> None:
        """Lose what the TCP port of this host sends to another one: connections hang."""
        self._net(*f"ip rule add to {other.address} ipproto tcp sport {port} blackhole".split())

    def deliver(self, other: Host, port: int) -> None:
        """End `drop`."""
        self._net(*f"ip rule del to {other.address} ipproto tcp sport {port} blackhole".split())

    def _net(self, *command: str) -> None:
        _run("nsenter", "-t", str(self._init), "--net", *command)

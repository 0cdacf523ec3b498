"""Two machines in one: namespaces with a name, an address and a network device of their own, and a cable between them.

They need root, `unshare` and `nsenter` (util-linux) and `ip` (iproute2), and change nothing outside themselves. They
are gone with the process that holds each of them, which ends when this one does, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

DEVICE = "eth0"
NAMES = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
# Its number as others see it, then a /proc of its own; it ends, and with it all that was started there, when nobody
# holds the other end of its input any more.
HELD = """
read -r pid rest < /proc/self/stat
mount -t proc proc /proc && mount --bind "$2" /etc/hosts && hostname "$1" && ip link set lo up || exit
echo "$pid" && exec cat
"""


class Unavailable(Exception):
    """There can be no namespaces here; the message says why."""


class Host:
    """One of the machines.

    Args:
        name, address: its own.
        hosts: a file that takes the place of /etc/hosts there.

    Raises:
        Unavailable: the system does not allow it.
    """

    def __init__(self, name: str, address: str, hosts: Path):
        self.name, self.address = name, address
        kinds = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child")
        self._holder = subprocess.Popen(
            ["unshare", *kinds, "sh", "-c", HELD, "sh", name, str(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = self._holder.stdout.readline()
        if not said:
            raise Unavailable(self._holder.communicate()[1].strip())
        self.pid = int(said)

    def command(self, folder: Path, *words: str) -> list[str]:
        """What runs a command there, in a folder."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid", f"--wd={folder}", *words]

    def ip(self, *words: str) -> None:
        asked = subprocess.run(
            ["nsenter", f"--target={self.pid}", "--net", "ip", *words], capture_output=True, text=True
        )
        if asked.returncode:
            raise Unavailable(f"ip {' '.join(words)}: {asked.stderr.strip()}")

    def cut_off(self) -> None:
        """Pulls the cable: what is sent arrives nowhere, and nobody is told."""
        self.ip("link", "set", DEVICE, "down")

    def come_back(self) -> None:
        self.ip("link", "set", DEVICE, "up")

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.communicate()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two machines, node1 and node2, while inside.

    Raises:
        Unavailable: a tool is missing, or this process may not make them.
    """
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]:
        raise Unavailable(f"{', '.join(missing)} not found; install iproute2 and util-linux")
    if os.geteuid() != 0:
        raise Unavailable("not root")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        file = folder / "hosts"
        file.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in NAMES.items()))
        first, second = (stack.enter_context(Host(name, address, file)) for name, address in NAMES.items())
        first.ip("link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(second.pid))
        for host in (first, second):
            host.ip("address", "add", f"{host.address}/24", "dev", DEVICE)
            host.come_back()
        yield first, second


@contextmanager
def on_host(pid: int) -> Iterator[None]:
    """From now on this process has the network and the name of the machine that process `pid` is on."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    yield

"""Two hosts on one machine: network namespaces with a link between them. Needs root and iproute2.

::

    namespace zero3-0   device "wire"   <- tbf, veth ->   device "wire"   namespace zero3-1
    10.213.0.1                                                            10.213.0.2
"""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

DEVICE = "wire"  # the name of either end of the link
FIRST_ADDRESS = "10.213.0.1"  # of the first host
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000  # of Linux's setns() and unshare()


class NoHostsError(RuntimeError):
    """This process cannot make hosts; the message says what it lacks."""


@contextmanager
def linked_hosts(rate: str) -> Iterator[list[str]]:
    """Makes two namespaces and a link between them, and yields their names.

    Args:
        rate: the link's, as tc has it, such as "1gbit".

    Raises:
        NoHostsError: this process is not root's, may not make namespaces, or iproute2 is missing.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise NoHostsError(
            "two hosts are network namespaces: run this as root, with ip and tc (Debian: iproute2) "
            "on PATH"
        )
    names = [f"zero3-{os.getpid()}-{host}" for host in range(2)]
    with ExitStack() as undo:
        for name in names:
            _run(f"ip netns add {name}")
            undo.callback(_run, f"ip netns del {name}")
        peer = f"type veth peer name {DEVICE} netns {names[1]}"
        _run(f"ip link add name {DEVICE} netns {names[0]} {peer}")
        for host, name in enumerate(names):
            _run(f"ip -n {name} addr add 10.213.0.{host + 1}/24 dev {DEVICE}")
            for device in (DEVICE, "lo"):
                _run(f"ip -n {name} link set {device} up")
            set_rate(name, rate, patience="50ms")
        yield names


def set_rate(name: str, rate: str, patience: str, burst: str = "256kb") -> None:
    """Sets the rate at which a host sends.

    Args:
        name: the host.
        rate: as tc has it, such as "1gbit".
        patience: how long a packet may wait before it is dropped, such as "50ms".
        burst: what is sent at once after a pause.
    """
    shape = f"tbf rate {rate} burst {burst} latency {patience}"
    _run(f"tc -n {name} qdisc replace dev {DEVICE} root {shape}")


def set_link(name: str, state: str) -> None:
    """Cuts the link at a host ("down"), or mends it ("up"). Connections stay open."""
    _run(f"ip -n {name} link set {DEVICE} {state}")


def enter(name: str) -> None:
    """Moves this thread, and threads that it starts from now on, to a host, and gloo with them.

    The host's name is ``name``. Connections that exist stay where they were made.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0 or libc.unshare(_CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    socket.sethostname(name)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def bytes_sent(name: str) -> int:
    """Returns the bytes that a host has sent over the link so far."""
    counter = Path("/sys/class/net", DEVICE, "statistics/tx_bytes")
    return int(_run(f"ip netns exec {name} cat {counter}"))


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoHostsError(f"{command}: {done.stderr.strip()}")
    return done.stdout

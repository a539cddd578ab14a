"""Two network namespaces joined by a link of a given rate and delay; needs root, ``ip``, ``tc`` and /dev/net/tun.

Each namespace has a tap device, whose rate ``tc tbf`` limits. A process for each direction passes its frames on, after the delay.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Link", "link", "why_not"]

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
MTU = 9000
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Link:
    """The ends of a link: names of namespaces, of their devices, and addresses."""

    names: tuple[str, str]
    devices: tuple[str, str]
    addresses: tuple[str, str] = ADDRESSES

    def command(self, end: int) -> list[str]:
        """Make the words to put before a command that is to run at an end."""
        return ["ip", "netns", "exec", self.names[end]]


def why_not() -> str:
    """Tell why there can be no link here; "" if there can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing or not os.path.exists("/dev/net/tun"):
        return f"{' and '.join([*missing] or ['/dev/net/tun'])} is not here"
    return ""


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):  # os.setns is there from Python 3.12 on
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _tap(namespace: str, device: str) -> int:
    """Make a tap device in a namespace, and open it."""
    back = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter(there)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TAP | _IFF_NO_PI))
        return fd
    finally:
        _enter(back)
        os.close(there)
        os.close(back)


def relay(source: int, target: int, delay_s: float) -> None:
    """Pass frames on, each ``delay_s`` after it came."""
    frames: deque[tuple[float, bytes]] = deque()
    poll = select.poll()
    poll.register(source, select.POLLIN)
    while True:
        wait_s = max(0.0, frames[0][0] - time.monotonic()) if frames else 1.0
        if poll.poll(int(wait_s * 1000)):
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    frames.append((time.monotonic() + delay_s, os.read(source, MTU + 64)))
        now = time.monotonic()
        while frames and frames[0][0] <= now:
            with contextlib.suppress(BlockingIOError, OSError):  # a full queue drops frames, as a link does
                os.write(target, frames[0][1])
            frames.popleft()


@contextlib.contextmanager
def link(bits_per_s: int, delay_s: float) -> Iterator[Link]:
    """A link of this rate and of this delay in each direction."""
    found = Link((f"fs{os.getpid()}a", f"fs{os.getpid()}b"), ("fslink0", "fslink1"))
    fds: list[int] = []
    relays: list[subprocess.Popen[bytes]] = []

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        for name, device, address in zip(found.names, found.devices, found.addresses, strict=True):
            run("ip", "netns", "add", name)
            fds.append(_tap(name, device))
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", device, "mtu", str(MTU), "txqueuelen", "10000", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
            rate = ("rate", f"{bits_per_s}bit", "burst", "256kb", "limit", "64mb")
            run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *rate)
        for source, target in (fds, fds[::-1]):
            words = [sys.executable, "-m", __spec__.name, str(source), str(target), str(delay_s)]
            relays.append(subprocess.Popen(words, pass_fds=fds))
        yield found
    finally:
        for each in relays:
            each.kill()
            each.wait()
        for fd in fds:
            os.close(fd)
        for name in found.names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def stream_bytes_per_s(address: str, port: int, n_bytes: int, *, sends: bool) -> float:
    """Send, or receive, bytes by one TCP connection; return the receiver's rate once the first megabyte has come."""
    piece = bytes(1 << 20)
    if sends:
        with socket.create_server((address, port)) as server, server.accept()[0] as connection:
            for _ in range(n_bytes // len(piece) + 1):
                connection.sendall(piece)
        return 0.0
    for attempt in range(200):
        try:
            connection = socket.create_connection((address, port))
            break
        except OSError:
            if attempt == 199:
                raise
            time.sleep(0.05)
    buffer, got, begin, before = bytearray(1 << 20), 0, 0.0, 0
    with connection:
        while n := connection.recv_into(buffer):
            got += n
            if not begin and got >= len(piece):
                begin, before = time.perf_counter(), got
    return (got - before) / (time.perf_counter() - begin)


if __name__ == "__main__":
    relay(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

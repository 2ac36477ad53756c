"""Hosts for tests: network namespaces on one bridge, each with its own /dev/shm and host name.

    with Hosts(2) as hosts:
        processes = hosts.start("train.py", per_host=[2, 1])

Needs root, iproute2 and a kernel that allows it; `why_not()` says what is missing. Names begin with
this process's number, so that several may run at once, and leaving removes everything."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jaxring

# Where this process has jaxring from: its installation, or the source tree it was built in.
JAXRING_AT = Path(jaxring.__file__).parents[1]
PORT = 21000

# In its namespace: a /dev/shm and a host name of its own, then the program, which dies with us.
_ENTER = (
    'mount -t tmpfs tmpfs /dev/shm && hostname $JR_HOST_NAME && exec setpriv --pdeathsig KILL "$@"'
)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@functools.cache
def why_not() -> str:
    """Why no hosts can be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [
        tool for tool in ("ip", "tc", "ss", "unshare", "setpriv") if not shutil.which(tool)
    ]:
        return f"{missing[0]} is not installed (apt-get install iproute2 util-linux)"
    try:
        with Hosts(1):
            pass
    except subprocess.CalledProcessError as e:
        return f"`{' '.join(e.cmd)}` failed: {(e.stderr or '').strip()}"
    return ""


@dataclass
class Rank:
    rank: int
    popen: subprocess.Popen[str]


def congestion_controls() -> list[str]:
    """Those of TCP that this kernel has."""
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


class Hosts:
    """`count` hosts, numbered from 0; host i has the address 10.77.0.<i+1> (and fd77::<i+1>).

    `congestion` is their TCP's congestion control, where this kernel has it: cubic is Linux's
    default; None leaves this machine's. BBR takes the wire between namespaces for slow (large
    messages take 1.6 to 3 times as long, with jaxring and with gloo)."""

    def __init__(self, count: int, congestion: str | None = "cubic"):
        self.count = count
        self.congestion = congestion
        self._tag = f"jr{os.getpid()}x{secrets.token_hex(2)}"
        self._started: list[subprocess.Popen[str]] = []

    def namespace(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def address(self, host: int, v6: bool = False) -> str:
        return f"fd77::{host + 1}" if v6 else f"10.77.0.{host + 1}"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _make(self) -> None:
        switch = f"{self._tag}sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in range(self.count):
            name = self.namespace(host)
            _ip("netns", "add", name)
            link = ("link", "add", "eth0", "netns", name, "type", "veth")
            _ip(*link, "peer", "name", f"port{host}", "netns", switch)
            _ip("-n", switch, "link", "set", f"port{host}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "addr", "add", f"{self.address(host, True)}/64", "dev", "eth0", "nodad")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
            if self.congestion in congestion_controls():
                write = f"echo {self.congestion} >/proc/sys/net/ipv4/tcp_congestion_control"
                _ip("netns", "exec", name, "sh", "-c", write)
            # `ip netns exec` lays these over /etc: gloo looks its host up by name.
            etc = Path("/etc/netns") / name
            etc.mkdir(parents=True)
            names = [f"{self.address(i)} host{i}\n" for i in range(self.count)]
            (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))

    def _remove(self) -> None:
        for popen in self._started:
            if popen.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(popen.pid, signal.SIGKILL)
            with popen:
                pass
        for name in (f"{self._tag}sw", *map(self.namespace, range(self.count))):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def cut(self, host: int) -> None:
        """Silently: the others see neither a reset nor an end."""
        _ip("-n", f"{self._tag}sw", "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        _ip("-n", f"{self._tag}sw", "link", "set", f"port{host}", "up")

    def reset(self, host: int) -> None:
        """Ends every TCP connection of the host by a reset, as a firewall may."""
        command = ["ip", "netns", "exec", self.namespace(host), "ss", "-K", "-t", "state"]
        subprocess.run([*command, "established"], check=True, capture_output=True, text=True)

    def limit(self, rate: str) -> None:
        """What each host sends, for example "1gbit"."""
        for host in range(self.count):
            command = ["tc", "-n", self.namespace(host), "qdisc", "add", "dev", "eth0", "root"]
            command += ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            subprocess.run(command, check=True, capture_output=True, text=True)

    def add_interface(self, host: int, name: str, address: str) -> None:
        """A second one, on the same wire."""
        of_host = ("-n", self.namespace(host))
        _ip(*of_host, "link", "add", "link", "eth0", "name", name, "type", "macvlan")
        _ip(*of_host, "addr", "add", address, "dev", name)
        _ip(*of_host, "link", "set", name, "up")

    def listening(self, host: int) -> set[tuple[str, int]]:
        """The IPv4 addresses and ports that something listens at."""
        command = ["ip", "netns", "exec", self.namespace(host), "ss", "-Htln4"]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        ends = [line.split()[3].rpartition(":") for line in run.stdout.splitlines()]
        return {(address, int(port)) for address, _, port in ends}

    def popen(self, host: int, argv: Sequence[str], **env: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.namespace(host), "unshare", "--mount", "--uts"]
        popen = subprocess.Popen(
            [*command, "sh", "-c", _ENTER, "sh", *argv],
            env={**os.environ, "PYTHONPATH": str(JAXRING_AT), "JR_HOST_NAME": f"host{host}", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(popen)
        return popen

    def start(
        self, per_host: Sequence[int], *argv: str, v6: bool = False, **env: str
    ) -> list[Rank]:
        """`python argv…` as every rank, numbered host by host."""
        coordinator = self.address(0, v6)
        places = [host for host, n in enumerate(per_host) for _ in range(n)]
        env = {
            "JAXRING_WORLD_SIZE": str(len(places)),
            "JAXRING_COORDINATOR": f"[{coordinator}]:{PORT}" if v6 else f"{coordinator}:{PORT}",
            "JAXRING_SECRET": secrets.token_hex(16),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            **env,
        }
        return [
            Rank(rank, self.popen(host, [sys.executable, *argv], JAXRING_RANK=str(rank), **env))
            for rank, host in enumerate(places)
        ]


def outputs(ranks: Sequence[Rank], timeout_s: float) -> list[str]:
    """What each has printed, once all have ended; AssertionError if one did not end well."""
    texts = ended(ranks, timeout_s)
    for rank, text in zip(ranks, texts, strict=True):
        assert rank.popen.returncode == 0, f"rank {rank.rank}: {text[-3000:]}"
    return texts


def ended(ranks: Sequence[Rank], timeout_s: float) -> list[str]:
    deadline = time.monotonic() + timeout_s
    texts = []
    for rank in ranks:
        try:
            text, _ = rank.popen.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(rank.popen.pid, signal.SIGKILL)
            text = "(did not end) " + rank.popen.communicate()[0]
        texts.append(text)
    return texts


def lines(text: str, mark: str) -> Iterator[str]:
    """What follows `mark` in the lines that begin with it."""
    for line in text.splitlines():
        if line.startswith(mark):
            yield line[len(mark) :].strip()

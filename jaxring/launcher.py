"""Starts the processes of a job on this host, follows their output and ends them together.

One thread and one loop: pipes, exits (pidfds) and signals all wake the same selector, so nothing
polls and nothing can be missed. Each process leads its own session, so that a signal reaches its
own children too, and is killed by the kernel if the launcher dies."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Command", "Failure", "Outcome", "launch"]

SETTLE_S = 0.5  # after the first failure: ranks that fail because of it report by themselves
TAIL_LINES = 400
LINE_BYTES_MAX = 1 << 16  # longer ones are passed on in pieces
DRAIN_S = (
    1.0  # how long a grandchild that holds a pipe open may still write after its parent has ended
)

# Runs in the child before the program: dies with its parent (PR_SET_PDEATHSIG, 1), also if that was
# too fast for us. An exec instead of preexec_fn: a fork that runs Python code in a process with
# JAX's threads may deadlock.
_GUARD = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
_CONSEQUENCE = re.compile(r"jaxring\.(errors\.)?(PeerError|AbortedError)\b")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Command:
    """One process to start: its rank, its whole environment and its arguments, `argv[0]` a path."""

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Failure:
    """How a process ended. `code` is its exit code, or minus the number of the signal that killed
    it."""

    rank: int
    pid: int
    code: int
    last_lines: tuple[str, ...]

    @property
    def how(self) -> str:
        if self.code >= 0:
            return f"exited with code {self.code}"
        return f"was killed by {signal.Signals(-self.code).name}"

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 + signal number for a killed process."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass
class Outcome:
    """`failure`: the first process that failed by itself; `signal`: what stopped the launcher; else
    all went well."""

    failure: Failure | None = None
    signal: int | None = None
    timed_out: bool = False


@dataclass
class _Process:
    rank: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    code: int | None = None
    buffers: dict[str, bytearray] = field(default_factory=dict)  # of open pipes: an unfinished line
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))  # of stderr


Sink = Callable[[int, str, bytes], None]


def launch(
    commands: Sequence[Command],
    sink: Sink,
    *,
    grace_s: float = 5.0,
    timeout_s: float | None = None,
    timeout_signal: int = signal.SIGTERM,
) -> Outcome:
    """Runs `commands` until all have ended; when one fails, or a signal comes, ends the others.

    Args:
      commands: what to run, all at once.
      sink: called with rank, "stdout" or "stderr", and a line without its end; the last one of a
        pipe may have had no line end.
      grace_s: after being asked to end, a process has this long before it is killed.
      timeout_s: end all after this long (None: never), with `timeout_signal` first.
    """
    job = _Job(sink, grace_s)
    with job.signals():
        try:
            for command in commands:
                job.start(command)
            job.run(timeout_s, timeout_signal)
        finally:
            job.kill_and_reap()
    job.close()
    return job.outcome()


class _Job:
    def __init__(self, sink: Sink, grace_s: float):
        self._sink = sink
        self._grace_s = grace_s
        self._selector = selectors.DefaultSelector()
        self._processes: list[_Process] = []
        self._failures: list[_Process] = []  # in the order in which they were seen
        self._plan: list[tuple[float, int]] = []  # signals still to send, with their times
        self._asked = False  # whether a signal has been sent: later failures are our doing
        self._result = Outcome()

    def start(self, command: Command) -> None:
        guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
        popen = subprocess.Popen(
            [*guard, *command.argv],
            env=dict(command.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        process = _Process(command.rank, popen, os.pidfd_open(popen.pid))
        self._processes.append(process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, (self._ended, process, ""))
        for name, pipe in (("stdout", popen.stdout), ("stderr", popen.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            process.buffers[name] = bytearray()
            self._selector.register(pipe, selectors.EVENT_READ, (self._read, process, name))

    def run(self, timeout_s: float | None, timeout_signal: int) -> None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while any(p.code is None for p in self._processes):
            now = time.monotonic()
            if end is not None and now >= end:
                end, self._result.timed_out = None, True
                self._plan = [(now, timeout_signal), (now + self._grace_s, signal.SIGKILL)]
            while self._plan and self._plan[0][0] <= now:
                self._send(self._plan.pop(0)[1])
            times = [self._plan[0][0]] if self._plan else []
            times += [end] if end is not None else []
            self._step(max(0.0, min(times) - now) if times else None)
        drained = time.monotonic() + DRAIN_S
        while any(p.buffers for p in self._processes) and time.monotonic() < drained:
            self._step(0.05)

    def _step(self, wait_s: float | None) -> None:
        # Exits come last, so that a process's last words are there when its end is judged.
        ready = [key.data for key, _ in self._selector.select(wait_s)]
        for act, process, name in sorted(ready, key=lambda data: data[0] == self._ended):
            act(process, name)

    def _read(self, process: _Process, name: str) -> None:
        pipe = process.popen.stdout if name == "stdout" else process.popen.stderr
        assert pipe is not None
        try:
            data = os.read(pipe.fileno(), LINE_BYTES_MAX)
        except BlockingIOError:
            return
        buffer = process.buffers[name]
        buffer += data
        *lines, rest = bytes(buffer).split(b"\n")
        if len(rest) >= LINE_BYTES_MAX or (rest and not data):
            lines, rest = [*lines, rest], b""
        buffer[:] = rest
        for line in lines:
            self._pass_on(process, name, line)
        if not data:
            self._selector.unregister(pipe)
            del process.buffers[name]

    def _pass_on(self, process: _Process, name: str, line: bytes) -> None:
        if name == "stderr":
            process.tail.append(line.decode(errors="replace"))
        try:
            self._sink(process.rank, name, line)
        except BrokenPipeError:  # as in `jaxring run … | head`: nobody listens any more
            self._sink = lambda rank, name, line: None
            self._on_signal(signal.SIGPIPE)

    def _ended(self, process: _Process, _: str) -> None:
        # The zombie is reaped at the end only: until then its process group's number can't be
        # taken.
        self._selector.unregister(process.pidfd)
        status = os.waitid(os.P_PID, process.popen.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None
        process.code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        for name in list(process.buffers):
            self._read(process, name)
        if process.code != 0 and not self._asked:
            self._failures.append(process)
            if not self._plan:
                at = time.monotonic() + SETTLE_S
                self._plan = [(at, signal.SIGTERM), (at + self._grace_s, signal.SIGKILL)]

    def _send(self, number: int) -> None:
        self._asked = True
        for process in self._processes:
            if process.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.popen.pid, number)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._result.signal is not None:  # the second one: at once
            self._plan = [(now, signal.SIGKILL)]
            return
        self._result.signal = number
        gentle = number if number in (signal.SIGINT, signal.SIGHUP) else signal.SIGTERM
        # A rank that waits in native code can't run Python's SIGINT handler; SIGTERM needs none.
        self._plan = [(now, gentle), (now + 2, signal.SIGTERM), (now + 4, signal.SIGKILL)]

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Makes SIGINT, SIGTERM and SIGHUP events of the loop; only the main thread can."""
        try:
            signal.set_wakeup_fd(-1)
        except ValueError:
            yield
            return
        wake, written = socket.socketpair()
        wake.setblocking(False)
        written.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, (self._signalled, wake, ""))
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        before_fd = signal.set_wakeup_fd(written.fileno())
        try:
            yield
        finally:
            signal.set_wakeup_fd(before_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.unregister(wake)
            wake.close()
            written.close()

    def _signalled(self, wake: socket.socket, _: str) -> None:
        for number in wake.recv(64):
            self._on_signal(number)

    def kill_and_reap(self) -> None:
        """Ends what is left of the processes and of what they have started, and takes all exit
        codes."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.popen.pid, signal.SIGKILL)
        for process in self._processes:
            with process.popen:  # closes the pipes and waits
                os.close(process.pidfd)

    def close(self) -> None:
        self._selector.close()

    def outcome(self) -> Outcome:
        causes = [p for p in self._failures if not _CONSEQUENCE.search("\n".join(p.tail))]
        for process in [*causes, *self._failures][:1]:
            assert process.code is not None
            lines = tuple(last_words(list(process.tail)))
            self._result.failure = Failure(process.rank, process.popen.pid, process.code, lines)
        return self._result


def last_words(lines: list[str]) -> list[str]:
    """The last traceback in `lines`, with those that it was raised from, or the last 20 lines."""
    starts = [i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return lines[-20:]
    first = len(starts) - 1
    while first > 0 and any(
        line.startswith(_CHAINED) for line in lines[starts[first - 1] : starts[first]]
    ):
        first -= 1
    return lines[starts[first] :]

"""One process of a job as its launcher has it: how it is started, what it says, how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxring import errors
from jaxring._src.outcomes import End, Failure, last_words

TAIL_LINES = 400
LINE_BYTES_MAX = 1 << 16  # longer ones are passed on in pieces
STOPPED_NOTE_S = 5.0  # after so long it is said that one of them is stopped
RESTART_VARIABLE = "JAXRING_RESTART"  # how often a rank's process has been started again

# Runs in the child before the program: dies with its parent (PR_SET_PDEATHSIG, 1), however fast
# for us. An exec, no preexec_fn: a fork that runs Python code beside JAX's threads may deadlock.
_GUARD = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True)
class Command:
    """One process to start: its rank, its whole environment and its arguments, `argv[0]` a path."""

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str]

    @property
    def restarts(self) -> int:
        """How often this rank's process has been started again."""
        return int(self.env.get(RESTART_VARIABLE, "0"))


@dataclass
class Process:
    """
    Attributes:
      buffers: of open pipes, by name: an unfinished line.
      tail: the last lines of stderr.
      code: once it has ended, as in `Failure`.
      asked: whether the launcher had told it to end before it did.
    """

    command: Command
    popen: subprocess.Popen[bytes]
    pidfd: int
    begun: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    code: int | None = None
    asked: bool = False
    buffers: dict[str, bytearray] = field(default_factory=dict)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    killed_as_stopped: bool = False
    _stopped_at: float | None = None  # when that was first seen
    _stopped_noted: bool = False

    @property
    def rank(self) -> int:
        return self.command.rank

    @property
    def pid(self) -> int:
        return self.popen.pid

    @classmethod
    def start(cls, command: Command) -> Process:
        guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
        try:
            popen = subprocess.Popen(
                [*guard, *command.argv],
                env=dict(command.env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as e:
            raise errors.UsageError(
                f"the system does not start a process for rank {command.rank} ({e.strerror}); "
                "raise the limits of this one (ulimit -u, -n) or start fewer ranks"
            ) from None
        process = cls(command, popen, os.pidfd_open(popen.pid))
        for name in ("stdout", "stderr"):
            os.set_blocking(process.pipe(name), False)
            process.buffers[name] = bytearray()
        return process

    def pipe(self, name: str) -> int:
        """The descriptor of "stdout" or "stderr"."""
        stream = self.popen.stdout if name == "stdout" else self.popen.stderr
        assert stream is not None
        return stream.fileno()

    def read(self, name: str) -> list[bytes]:
        """The lines that have come; at the pipe's end its buffer is gone."""
        try:
            data = os.read(self.pipe(name), LINE_BYTES_MAX)
        except BlockingIOError:
            return []
        buffer = self.buffers[name]
        buffer += data
        *lines, rest = bytes(buffer).split(b"\n")
        if len(rest) >= LINE_BYTES_MAX or (rest and not data):
            lines, rest = [*lines, rest], b""
        buffer[:] = rest
        if not data:
            del self.buffers[name]
        if name == "stderr":
            self.tail.extend(line.decode(errors="replace") for line in lines)
        return lines

    def note_end(self, asked: bool) -> int:
        """Its code, once its pidfd says that it has ended. The zombie is reaped at the end only:
        until then its process group's number can't be taken."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        self.code, self.ended, self.asked = code, time.monotonic(), asked
        return code

    def signal(self, number: int) -> None:
        """To what it has started, too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> None:
        with self.popen:  # closes the pipes and waits
            os.close(self.pidfd)

    def end_if_stopped(self, now: float, limit_s: float) -> str:
        """Kills it where it has been stopped (SIGSTOP) for so long; what to say meanwhile."""
        if not is_stopped(self.pid):
            self._stopped_at = None
            return ""
        self._stopped_at = self._stopped_at or now
        left_s = self._stopped_at + limit_s - now
        if left_s <= 0:
            self.killed_as_stopped = True
            self.signal(signal.SIGKILL)
        elif not self._stopped_noted and now >= self._stopped_at + STOPPED_NOTE_S:
            self._stopped_noted = True
            return (
                f"this process (pid {self.pid}) is stopped (SIGSTOP) and others have "
                f"ended; kill -CONT {self.pid} lets it go on, in {left_s:.0f} s it will be killed"
            )
        return ""

    def failure(self) -> Failure:
        assert self.code is not None
        words = tuple(last_words(list(self.tail)))
        return Failure(self.rank, self.pid, self.code, words, self.killed_as_stopped)

    def end(self) -> End:
        """How it has ended, once all are reaped."""
        code = self.popen.returncode if self.code is None else self.code
        seconds = (self.ended or time.monotonic()) - self.begun
        asked = self.asked or self.code is None
        return End(self.rank, self.pid, code, seconds, self.command.restarts, asked)


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or the like."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] == "T"
    return False

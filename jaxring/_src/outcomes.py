"""How a job's processes ended, and what to show of what the one to blame has said."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# How a rank fails because of another one, which is to blame.
_CONSEQUENCE = re.compile(
    r"jaxring\.(errors\.)?(PeerError|AbortedError)\b|, which has closed communicator "
)
# How it ends by an error that its next run would meet again.
_USAGE = re.compile(r"jaxring\.errors\.(UsageError|UnboundAxisError): ")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Failure:
    """How a process ended. `code` is its exit code, or minus the number of the signal that killed
    it."""

    rank: int
    pid: int
    code: int
    last_lines: tuple[str, ...]
    stopped: bool = False

    @property
    def how(self) -> str:
        if self.stopped:
            return "was still stopped (SIGSTOP) long after others had ended, and was killed"
        if self.code >= 0:
            return f"exited with code {self.code}"
        return f"was killed by {signal.Signals(-self.code).name}"

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 + signal number for a killed process."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True)
class End:
    """How any process ended, in order of start.

    Attributes:
      code: as of `Failure`.
      seconds: how long it ran.
      restarts: how often this rank had been started before.
      asked: whether the launcher had told it to end.
    """

    rank: int
    pid: int
    code: int
    seconds: float
    restarts: int
    asked: bool

    def row(self) -> dict[str, Any]:
        """For programs."""
        return {
            "rank": self.rank,
            "pid": self.pid,
            "exit_code": self.code if self.code >= 0 else None,
            "signal": signal.Signals(-self.code).name if self.code < 0 else None,
            "ended_by_launcher": self.asked,
            "restarts": self.restarts,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class Outcome:
    """`failure`: the first process that failed by itself; `signal`: what stopped the launcher; else
    all went well.

    Attributes:
      stopped: (rank, pid) of those that were stopped (SIGSTOP) when the others were told to end.
      ends: of all processes.
    """

    failure: Failure | None = None
    signal: int | None = None
    timed_out: bool = False
    stopped: tuple[tuple[int, int], ...] = ()
    ends: tuple[End, ...] = field(default=(), compare=False)

    @property
    def exit_code(self) -> int:
        """As the shell shall see it."""
        if self.signal is not None:
            return 128 + self.signal
        return 0 if self.failure is None else self.failure.exit_code


def is_consequence(lines: Iterable[str]) -> bool:
    """Whether a process with these last lines failed because of another one."""
    return _CONSEQUENCE.search("\n".join(lines)) is not None


def is_usage_error(lines: Iterable[str]) -> bool:
    """Whether a process with these last lines ended by a UsageError that nobody caught."""
    words = last_words(list(lines))
    last = max((i for i, line in enumerate(words) if line.startswith(_TRACEBACK)), default=None)
    return last is not None and any(_USAGE.match(line) for line in words[last:])


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

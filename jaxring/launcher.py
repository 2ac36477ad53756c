"""Starts the processes of a job on this host, follows their output and ends them together.

One thread and one loop: pipes, exits (pidfds) and signals all wake the same selector, so nothing
polls and nothing can be missed. Each process leads its own session, so that a signal reaches its
own children too, and is killed by the kernel if the launcher dies."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from jaxring._src.elastic_losses import Losses
from jaxring._src.launched import Command, Process, is_stopped
from jaxring._src.outcomes import Failure, Outcome, is_consequence

__all__ = ["Command", "Failure", "Outcome", "launch"]

SETTLE_S = 0.5  # after the first failure: ranks that fail because of it report by themselves
LOOK_S = 1.0  # how often those that are left are looked at, once others have ended
DRAIN_S = 1.0  # how long a grandchild that holds a pipe open may write after its parent's end

Sink = Callable[[int, str, bytes], None]


def launch(
    commands: Sequence[Command],
    sink: Sink,
    *,
    grace_s: float = 5.0,
    timeout_s: float | None = None,
    timeout_signal: int = signal.SIGTERM,
    stopped_s: float | None = None,
    restarts: int | None = None,
    on_gone: Callable[[int], None] = lambda count: None,
    on_left: Callable[[int, int], None] = lambda rank, pid: None,
) -> Outcome:
    """Runs `commands` until all have ended; when one fails, or a signal comes, ends the others.

    With `restarts` the job is elastic: one that fails is started again, as often as that in all,
    and then missing; the others go on. It has failed if none has ended well, or if one fails
    by itself once another has ended well.

    Args:
      commands: what to run, all at once.
      sink: called with rank, "stdout" or "stderr", and a line without its end; the last one of a
        pipe may have had no line end.
      grace_s: after being asked to end, a process has this long before it is killed.
      timeout_s: end all after this long (None: never), with `timeout_signal` first.
      stopped_s: once others have ended, one that stays stopped (SIGSTOP) for this long is killed.
      restarts: how many failures are made good. A process that has been started again finds in
        JAXRING_RESTART how often.
      on_gone: of an elastic job, called with the number of processes that are missing for good.
      on_left: called with rank and pid of a process that has ended well while others still run.
    """
    job = _Job(sink, grace_s, stopped_s, on_left)
    if restarts is not None:
        job.losses = Losses(restarts, on_gone)
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
    def __init__(
        self,
        sink: Sink,
        grace_s: float,
        stopped_s: float | None,
        on_left: Callable[[int, int], None],
    ):
        self._sink = sink
        self._grace_s = grace_s
        self._stopped_s = stopped_s
        self._on_left = on_left
        self._selector = selectors.DefaultSelector()
        self._processes: list[Process] = []
        self._failures: list[Process] = []  # in the order in which they were seen
        self._left: deque[Process] = deque()  # well, and `on_left` has not been told
        self._plan: list[tuple[float, int]] = []  # signals still to send, with their times
        self._asked = False  # whether a signal has been sent: later failures are our doing
        self._result = Outcome()
        self.losses: Losses | None = None  # of an elastic job

    def start(self, command: Command) -> None:
        process = Process.start(command)
        self._processes.append(process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, (self._ended, process, ""))
        for name in process.buffers:
            data = self._read, process, name
            self._selector.register(process.pipe(name), selectors.EVENT_READ, data)

    def run(self, timeout_s: float | None, timeout_signal: int) -> None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while any(p.code is None for p in self._processes):
            now = time.monotonic()
            if end is not None and now >= end:
                end, self._result.timed_out = None, True
                self._plan = [(now, timeout_signal), (now + self._grace_s, signal.SIGKILL)]
            while self._plan and self._plan[0][0] <= now:
                self._send(self._plan.pop(0)[1])
            while self._left and self._left[0].ended + SETTLE_S <= now:
                self._on_left(self._left[0].rank, self._left.popleft().pid)
            times = [self._plan[0][0]] if self._plan else []
            times += [self._left[0].ended + SETTLE_S] if self._left else []
            if self._stopped_s is not None and self._is_ending():
                self._look_for_stopped(now, self._stopped_s)
                times.append(now + LOOK_S)
            times += [end] if end is not None else []
            self._step(max(0.0, min(times) - now) if times else None)
        drained = time.monotonic() + DRAIN_S
        while any(p.buffers for p in self._processes) and time.monotonic() < drained:
            self._step(0.05)

    def _is_ending(self) -> bool:
        codes = [p.code for p in self._processes]
        return 0 in codes if self.losses else any(code is not None for code in codes)

    def _look_for_stopped(self, now: float, limit_s: float) -> None:
        """Those that are left may work on for hours, but a stopped one does nothing."""
        for process in self._processes:
            if process.code is not None or process.killed_as_stopped:
                continue
            if text := process.end_if_stopped(now, limit_s):
                self._say(process, text)

    def _step(self, wait_s: float | None) -> None:
        # Exits come last, so that a process's last words are there when its end is judged.
        ready = [key.data for key, _ in self._selector.select(wait_s)]
        for act, process, name in sorted(ready, key=lambda data: data[0] == self._ended):
            act(process, name)

    def _read(self, process: Process, name: str) -> None:
        for line in process.read(name):
            self._print(process, name, line)
        if name not in process.buffers:
            self._selector.unregister(process.pipe(name))

    def _say(self, process: Process, text: str) -> None:
        self._print(process, "stderr", f"jaxring run: {text}".encode())

    def _print(self, process: Process, name: str, line: bytes) -> None:
        try:
            self._sink(process.rank, name, line)
        except BrokenPipeError:  # as in `jaxring run … | head`: nobody listens any more
            self._sink = lambda rank, name, line: None
            self._on_signal(signal.SIGPIPE)

    def _ended(self, process: Process, _: str) -> None:
        self._selector.unregister(process.pidfd)
        code = process.note_end(self._asked)
        for name in list(process.buffers):
            self._read(process, name)
        if self._asked:
            return
        if code == 0:
            self._left.append(process)
        elif self.losses is not None:
            self._bear(process, self.losses)
        else:
            self._failures.append(process)
            if not self._plan:
                at = time.monotonic() + SETTLE_S
                self._plan = [(at, signal.SIGTERM), (at + self._grace_s, signal.SIGKILL)]

    def _bear(self, process: Process, losses: Losses) -> None:
        """A failure in an elastic job."""
        if 0 in (p.code for p in self._processes):  # the others have finished or are about to
            if not process.killed_as_stopped and not is_consequence(process.tail):
                self._failures.append(process)
            return
        again, text = losses.next_of(process)
        self._say(process, text)
        if again is not None:
            self.start(again)

    def _send(self, number: int) -> None:
        alive = [process for process in self._processes if process.code is None]
        if not self._asked:
            self._result.stopped = tuple((p.rank, p.pid) for p in alive if is_stopped(p.pid))
        self._asked = True
        for process in alive:
            process.signal(number)

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
            process.signal(signal.SIGKILL)
        for process in self._processes:
            process.reap()

    def close(self) -> None:
        self._selector.close()

    def outcome(self) -> Outcome:
        failures = self._failures
        if self.losses is not None and 0 not in (p.code for p in self._processes):
            failures = self.losses.failed
        causes = [p for p in failures if not is_consequence(p.tail)]
        for process in [*causes, *failures][:1]:
            self._result.failure = process.failure()
        self._result.ends = tuple(process.end() for process in self._processes)
        return self._result

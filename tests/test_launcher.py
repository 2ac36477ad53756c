import os
import signal
import subprocess
import sys
import threading
import time

from process_ends import ended

from jaxring import launcher
from jaxring._src import launched, outcomes

TRACEBACK = outcomes._TRACEBACK


class Collected(list):
    """A sink that remembers (rank, stream, text)."""

    def __call__(self, rank, name, line):
        self.append((rank, name, line.decode()))

    def of(self, rank, name="stdout"):
        return [text for r, n, text in self if (r, n) == (rank, name)]


def launch(*programs, sink=None, **options):
    """Runs Python programs given as text, one for each rank."""
    commands = [
        launcher.Command(rank, [sys.executable, "-uc", text], dict(os.environ))
        for rank, text in enumerate(programs)
    ]
    return launcher.launch(commands, sink if sink is not None else Collected(), **options)


def test_all_lines_come_whole():
    many = (
        "import os\nos.write(1, b''.join(b'%d %s\\n' % (i, b'x' * (i % 70)) for i in range(5000)))"
    )
    pieces = (
        "import os, time\n"
        "for part in (b'one', b' line\\npart', b'ial'):\n    os.write(1, part); time.sleep(0.05)"
    )
    sink = Collected()
    outcome = launch(many, pieces, sink=sink)
    assert outcome == launcher.Outcome()
    assert sink.of(0) == [f"{i} {'x' * (i % 70)}" for i in range(5000)]
    assert sink.of(1) == ["one line", "partial"]


def test_streams_are_kept_apart_and_long_lines_cut():
    sink = Collected()
    size = 3 * launched.LINE_BYTES_MAX
    launch(f"import sys; sys.stderr.write('e'); sys.stdout.write('o' * {size})", sink=sink)
    assert sink.of(0, "stderr") == ["e"]
    assert sum(map(len, sink.of(0))) == size


def test_the_first_failure_ends_the_others():
    sink = Collected()
    start = time.monotonic()
    outcome = launch("import time; time.sleep(100)", "import sys; sys.exit(3)", sink=sink)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.exit_code) == (1, 3)
    assert outcome.failure.how == "exited with code 3"
    assert time.monotonic() - start < 10


def test_a_process_that_ignores_sigterm_is_killed():
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('on'); time.sleep(100)"
    )
    start = time.monotonic()
    outcome = launch(stubborn, "import time; time.sleep(0.5); 1 / 0", grace_s=0.5)
    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert outcome.failure.last_lines[0] == TRACEBACK
    assert outcome.failure.last_lines[-1] == "ZeroDivisionError: division by zero"
    assert time.monotonic() - start < 10


def test_the_cause_is_named_not_its_consequence():
    """A rank that dies slowly is seen after those that its death has failed."""
    cause = "import time; time.sleep(0.4); raise SystemExit(7)"
    consequence = "raise RuntimeError('jaxring.PeerError: the process of rank 0 has died')"
    outcome = launch(cause, consequence)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.exit_code) == (0, 7)


def test_death_by_signal():
    outcome = launch("import os; os.kill(os.getpid(), 11)")
    assert outcome.failure is not None
    assert outcome.failure.how == "was killed by SIGSEGV"
    assert outcome.failure.exit_code == 139


def test_time_limit():
    outcome = launch("import time; time.sleep(100)", "pass", timeout_s=0.5, grace_s=0.5)
    assert outcome.timed_out
    assert outcome.failure is None


def test_grandchildren_end_too():
    """Also one that keeps the pipe open must neither delay the end nor stay."""
    sink = Collected()
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '100']).pid)"
    start = time.monotonic()
    launch(child, sink=sink)
    assert time.monotonic() - start < 10
    assert ended([int(sink.of(0)[0])])


def test_last_words_have_the_whole_chain():
    unrelated = [TRACEBACK, "  old", "KeyError: 1", "and so on"]
    chain = [TRACEBACK, "A: 1", "", outcomes._CHAINED[0] + " of …", "", TRACEBACK, "B: 2"]
    assert outcomes.last_words(unrelated + chain) == chain
    assert outcomes.last_words([str(i) for i in range(50)]) == [str(i) for i in range(30, 50)]


STOPPED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(0.3)"


def test_a_stopped_process_is_not_waited_for_without_end(monkeypatch):
    """Its parent waited for ever, once all others had ended well."""
    monkeypatch.setattr(launched, "STOPPED_NOTE_S", 0.5)
    monkeypatch.setattr(launcher, "LOOK_S", 0.1)
    sink = Collected()
    begin = time.monotonic()
    outcome = launch("pass", STOPPED, "import time\ntime.sleep(4)", sink=sink, stopped_s=2.0)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.code, outcome.failure.exit_code) == (1, -9, 137)
    assert "stopped (SIGSTOP)" in outcome.failure.how
    (line,) = sink.of(1, "stderr")
    assert f"kill -CONT {outcome.failure.pid} lets it go on" in line
    assert time.monotonic() - begin < 15


def test_a_stopped_process_may_go_on(monkeypatch):
    monkeypatch.setattr(launcher, "LOOK_S", 0.1)

    def wake():
        children = subprocess.run(
            ["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=True
        )
        for pid in children.stdout.split():
            if launched.is_stopped(int(pid)):
                os.kill(int(pid), signal.SIGCONT)

    timer = threading.Timer(1.5, wake)
    timer.start()
    assert launch("pass", STOPPED, stopped_s=60.0) == launcher.Outcome()
    timer.join()


def test_a_stopped_process_is_named_when_another_fails():
    outcome = launch("import time; time.sleep(2); 1 / 0", STOPPED)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.stopped) == (0, ((1, outcome.ends[1].pid),))


def test_how_each_ended_and_who_left_early():
    left = []
    outcome = launch(
        "pass",
        "import time; time.sleep(2); raise SystemExit(3)",
        "import time; time.sleep(100)",
        on_left=lambda rank, pid: left.append((rank, pid)),
    )
    assert left == [(0, outcome.ends[0].pid)]
    rows = [end.row() for end in outcome.ends]
    found = [(row["exit_code"], row["signal"], row["ended_by_launcher"]) for row in rows]
    assert found == [(0, None, False), (3, None, False), (None, "SIGTERM", True)]
    assert 2 < rows[1]["seconds"] < 15

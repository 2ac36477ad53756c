import os
import sys
import time

from jaxring import launcher

TRACEBACK = launcher._TRACEBACK


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


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(pids):
    """Whether all have ended, or do so at once: a signal takes its time."""
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


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
    size = 3 * launcher.LINE_BYTES_MAX
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
    chain = [TRACEBACK, "A: 1", "", launcher._CHAINED[0] + " of …", "", TRACEBACK, "B: 2"]
    assert launcher.last_words(unrelated + chain) == chain
    assert launcher.last_words([str(i) for i in range(50)]) == [str(i) for i in range(30, 50)]

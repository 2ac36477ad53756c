"""`jaxring run --restarts`: what the launcher makes good, and what it calls a failure."""

import os
import sys

import pytest

import jaxring
from jaxring import launcher
from jaxring.cli import run


class Job:
    """Python programs given as text, one for each rank, run as an elastic job."""

    def __init__(self, *programs, restarts):
        self.lines, self.gone = [], []
        head = "import os, sys, time\nagain = int(os.environ.get('JAXRING_RESTART', '0'))\n"
        environment = {k: v for k, v in os.environ.items() if k != "JAXRING_RESTART"}
        commands = [
            launcher.Command(rank, [sys.executable, "-uc", head + text], environment)
            for rank, text in enumerate(programs)
        ]
        self.outcome = launcher.launch(
            commands, self.sink, restarts=restarts, on_gone=self.gone.append
        )

    def sink(self, rank, name, line):
        self.lines.append((rank, name, line.decode()))

    def of(self, rank, name="stdout"):
        return [text for r, n, text in self.lines if (r, n) == (rank, name)]


PATIENT = "time.sleep(1.5); print('done')"


def test_a_process_that_fails_is_started_again():
    job = Job(PATIENT, "print('again', again); again < 2 and os.kill(os.getpid(), 9)", restarts=3)
    assert job.outcome == launcher.Outcome()
    assert (job.of(0), job.of(1)) == (["done"], ["again 0", "again 1", "again 2"])
    assert job.of(1, "stderr") == [
        "jaxring run: this process was killed by SIGKILL; it is started again (2 restarts left)",
        "jaxring run: this process was killed by SIGKILL; it is started again (1 restarts left)",
    ]
    assert job.gone == []


def test_when_no_restart_is_left_the_others_go_on():
    job = Job(PATIENT, "sys.exit(3)", "sys.exit(4)", restarts=1)
    assert job.outcome == launcher.Outcome()
    assert job.of(0) == ["done"]
    assert job.gone == [1, 2]
    said = job.of(1, "stderr") + job.of(2, "stderr")
    assert sum("no restart is left, the others go on without it" in line for line in said) == 2


def test_a_usage_error_is_not_restarted():
    """A restart would meet it again; the class's module is what a traceback shows."""
    program = (
        "error = type('UsageError', (ValueError,), {'__module__': 'jaxring.errors'})\n"
        "raise error('allreduce: unknown op')"
    )
    job = Job(program, PATIENT, restarts=3)
    assert job.outcome == launcher.Outcome()
    (said,) = [line for line in job.of(0, "stderr") if line.startswith("jaxring run")]
    assert said == (
        "jaxring run: this process exited with code 1 by a UsageError, which it would meet again: "
        "it is not started again, the others go on without it"
    )
    assert job.gone == [1]


def test_a_job_of_which_nobody_ends_well_has_failed():
    consequence = (
        "time.sleep(0.5); raise type('PeerError', (Exception,), {})('jaxring.PeerError: x')"
    )
    job = Job(consequence, "raise ValueError(f'mine {again}')", restarts=1)
    failure = job.outcome.failure
    assert failure is not None
    assert (failure.rank, failure.code) == (1, 1)
    assert failure.last_lines[-1].startswith("ValueError: mine")


@pytest.mark.parametrize(
    ("last_words", "code"),
    [
        ("raise OSError('the last checkpoint')", 1),
        ("sys.exit('jaxring.errors.AbortedError: the others have finished')", None),
    ],
)
def test_once_one_has_ended_well_a_failure_counts_unless_it_follows_from_that(last_words, code):
    job = Job("print('done')", f"time.sleep(1); {last_words}", restarts=5)
    failure = job.outcome.failure
    assert (failure and failure.code) == code
    assert "started again" not in str(job.lines)


def test_what_goes_with_it():
    for restarts, distributed in ((-1, False), (1, True)):
        with pytest.raises(jaxring.UsageError, match="--restarts >= 0, without --distributed"):
            run.run(["x.py"], ranks=2, restarts=restarts, distributed=distributed)

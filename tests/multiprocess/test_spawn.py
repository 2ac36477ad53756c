"""jaxring.testing.spawn and the fixture on it, as users' tests use them."""

import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jaxring
from jaxring.testing import spawn
from pytest_jaxring import jaxring_spawn  # noqa: F401 - a fixture; installed, it is a plugin


class NoDataError(Exception):
    pass


def results(comm, offset):
    return {
        "rank": comm.rank,
        "mean": jaxring.allreduce(jnp.float32(comm.rank), comm, "mean") + offset,
    }


def test_results_come_by_rank(jaxring_spawn):  # noqa: F811
    got = jaxring_spawn(results, 2, 10)
    assert got == [{"rank": 0, "mean": 10.5}, {"rank": 1, "mean": 10.5}]
    assert type(got[0]["mean"]) is np.ndarray


def fail(comm):
    if comm.rank == 1:
        raise NoDataError("no data")
    jaxring.allreduce(jnp.ones(3), comm).block_until_ready()


def test_the_first_failure_is_raised():
    with pytest.raises(NoDataError, match=r"no data\non rank 1 of 2:\nTraceback") as e:
        spawn(fail, 2)
    assert "in fail" in e.value.__notes__[0]


def die(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    jaxring.allreduce(jnp.ones(3), comm).block_until_ready()


def test_a_death_is_named():
    with pytest.raises(
        jaxring.PeerError, match=r"rank 1 of 2 \(pid \d+\) was killed by SIGKILL"
    ) as e:
        spawn(die, 2)
    assert e.value.rank == 1


def never_return(comm):
    if comm.rank == 1:
        time.sleep(1000)


def test_time_limit(capfd):
    with pytest.raises(jaxring.TimeoutError, match=r"ranks \[.*1\] of 2 did not return") as e:
        spawn(never_return, 2, timeout_s=8)
    assert 1 in (e.value.missing_ranks or ())
    assert "(most recent call first)" in capfd.readouterr().err  # where it was


@pytest.mark.parametrize("fn", [lambda comm: comm.rank, 3])
def test_what_a_child_cannot_import_is_refused(fn):
    with pytest.raises(jaxring.UsageError, match="top level of a module"):
        spawn(fn, 2)


def test_no_processes():
    with pytest.raises(jaxring.UsageError, match="n >= 1"):
        spawn(results, 0)

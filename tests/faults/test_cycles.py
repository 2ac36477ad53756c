"""Worlds that are made, fail and are made again: nothing is kept of them."""

import gc
import os

import jax
import jax.numpy as jnp
import pytest

import jaxring
from jaxring import errors
from jaxring.testing import spawn

CYCLES = 100


def levels():
    gc.collect()
    with open("/proc/self/maps") as f:
        segments = sum("memfd:jaxring" in line for line in f)
    with open("/proc/self/statm") as f:
        rss_mib = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    threads, fds = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    return {"segments": segments, "threads": threads, "fds": fds, "rss_mib": rss_mib}


def fail(comm, number):
    """The failure of this cycle, after a step that works."""
    total = jax.jit(lambda x, comm=comm: jaxring.allreduce(x, comm))(jnp.ones(40_000))
    assert float(total[-1]) == comm.world_size
    size = 5 if number % 3 == 1 and comm.rank == 1 else 4
    if number % 3 == 0 and comm.rank == 1:
        comm.abort("on purpose")  # it may find rank 0 about to end the step that rank 1 has ended
    if number % 3 == 2 and comm.rank == 1:
        return  # rank 1 makes one call less
    jaxring.allreduce(jnp.ones(size), comm).block_until_ready()
    raise AssertionError(f"no error in cycle {number}")


def cycles(comm):
    """Each way to fail in turn; returns the levels after some cycles and after all."""
    seen = []
    for number in range(CYCLES):
        try:
            fail(comm, number)
        except (jax.errors.JaxRuntimeError, ValueError) as e:
            kind = type(errors.from_exception(e)).__name__
            assert kind == ("AbortedError", "MismatchError", "MismatchError")[number % 3]
        comm.close()
        comm = jaxring.init()
        if number % 10 == 9:
            jax.clear_caches()  # what JAX keeps for each new function
            seen.append(levels())
    return seen[1], seen[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_worlds_leave_nothing():
    before = sorted(os.listdir("/dev/shm"))
    for first, last in spawn(cycles, 2, timeout_s=500, env={"JAXRING_TIMEOUT_S": "60"}):
        assert {**last, "rss_mib": 0} == {**first, "rss_mib": 0}
        assert last["segments"] == 1  # that of the last world
        assert last["rss_mib"] < first["rss_mib"] + 40, (first, last)
    assert sorted(os.listdir("/dev/shm")) == before

"""Two threads of each process, each on a communicator of its own, at the same time."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxring
from jaxring.testing import spawn


def two_threads(comm):
    """The second thread's communicator fails half-way; the first goes on undisturbed."""
    steady, doomed = comm.split(0), comm.split(0)
    assert steady is not None
    assert doomed is not None
    right, errors = [], []

    def work(mine):
        step = jax.jit(lambda x: jaxring.allreduce(x, mine))
        for number in range(60):
            if mine is doomed and number == 30 and comm.rank == 1:
                mine.abort("half-way")
            size = (3, 50_000)[number % 2]
            try:
                y = step(np.full(size, number + comm.rank, np.float32))
                np.testing.assert_array_equal(y, np.full(size, 2 * number + 1, np.float32))
            except Exception as e:
                errors.append((mine.key, number, jaxring.errors.from_exception(e)))
                return
        right.append(mine.key)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (steady, doomed)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - begin < 60
    assert right == [steady.key]
    ((key, number, error),) = errors
    assert (key, type(error)) == (doomed.key, jaxring.AbortedError)
    assert number <= 30
    return float(jaxring.allreduce(jnp.ones(3), comm)[0])


def test_one_fails_and_the_other_goes_on():
    assert spawn(two_threads, 2) == [2.0, 2.0]

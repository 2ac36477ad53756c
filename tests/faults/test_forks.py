"""Children that a rank forks, such as a data loader's workers: they take no part and harm
nothing."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np

import jaxring
from jaxring._src import engine
from jaxring.testing import spawn


def forked(act):
    """How a child that does `act`, and what jaxring does at exit, ends.

    It leaves by os._exit, as multiprocessing's children do: JAX alone makes sys.exit a segmentation
    fault there."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # JAX's own threads are gone too
        code = 1
        try:
            code = act()
            engine.at_exit()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def loads_data():
    np.random.default_rng(0).standard_normal(1000).sum()
    return 0


def rank_with_children(comm):
    step = jax.jit(lambda x: jaxring.allreduce(x, comm))
    x = jnp.ones(3)
    for _ in range(2):
        step(x).block_until_ready()
    seen = [forked(loads_data)]

    def calls_a_collective():
        try:
            step(x).block_until_ready()
        except (jax.errors.JaxRuntimeError, ValueError) as e:
            error = jaxring.errors.from_exception(e)
            return 11 if "was forked from" in str(error) else 12
        return 13

    def closes():
        comm.close()
        return 14

    def splits_and_aborts():
        try:
            comm.split(0)
        except jaxring.UsageError:
            comm.abort("a child of mine has failed")
            return 15
        return 16

    seen += [forked(calls_a_collective), forked(closes), forked(splits_and_aborts)]
    total = float(step(x)[0])  # the ranks themselves have noticed nothing
    return seen, total


def test_children_take_no_part():
    for seen, total in spawn(rank_with_children, 2, timeout_s=150):
        assert seen == [0, 11, 14, 15]
        assert total == 2

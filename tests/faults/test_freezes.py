"""A rank that lives but does not come, and one that is only slow."""

import itertools
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring
from jaxring.testing import spawn

COLLECTIVES = {
    "allreduce": lambda x, comm: jaxring.allreduce(x, comm),
    "reduce_scatter": lambda x, comm: jaxring.reduce_scatter(x, comm),
    "all_gather": lambda x, comm: jaxring.all_gather(x, comm),
    "all_to_all": lambda x, comm: jaxring.all_to_all(x, comm, 0, 0),
    "broadcast": lambda x, comm: jaxring.broadcast(x, comm, 1),
    "reduce": lambda x, comm: jaxring.reduce(x, comm),
    "ppermute": lambda x, comm: jaxring.ppermute(x, comm, [(0, 1), (1, 0)]),
    "barrier": lambda x, comm: jaxring.barrier(comm, x),
}


MOMENTS = ["before", "during", "between"]
OFTEN = [("stop", "before", 1), ("stop", "during", 0), ("elsewhere", "during", 1)]


@pytest.mark.parametrize(
    ("kind", "moment", "victim"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow)
        for case in itertools.product(["stop", "elsewhere"], MOMENTS, [0, 1])
    ],
)
def test_frozen(inject, kind, moment, victim):
    """SIGSTOP, and a rank that is busy elsewhere: case 2, jax #38503, where one rank that never
    entered step 5 hung every host. The others raise TimeoutError at the deadline, naming it."""
    inject(kind, moment, victim, deadline_s=2.5)


def test_frozen_in_a_chain(inject):
    """Rank 2 waits for rank 1 and that for rank 0, which is stopped half-way: rank 0 is named."""
    how = {"algorithm": "chain", "size": 8_000_000, "delay_s": 0.05, "launches": 4}
    inject("stop", "during", 0, deadline_s=3.0, **how)


def late(comm, late_s):
    """Rank 1 comes late to each collective, small and large, all at once on communicators of their
    own; gives by how much others waited."""
    calls = [(name, size) for name in COLLECTIVES for size in (6, 60_000)]
    own = [comm.split(f"{name} {size}") for name, size in calls]
    waited = [0.0] * len(calls)

    def run(i):
        (name, size), mine = calls[i], own[i]
        x = jnp.arange(2 * size, dtype=jnp.float32).reshape(2, size) + comm.rank
        expected = np.asarray(COLLECTIVES[name](x, mine))
        begin = time.monotonic()
        if comm.rank == 1:
            time.sleep(late_s)
        np.testing.assert_array_equal(COLLECTIVES[name](x, mine), expected)
        waited[i] = time.monotonic() - begin

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(run, range(len(calls))))
    return dict(zip(calls, waited, strict=True))


def check_late(late_s, deadline_s):
    env = {"JAXRING_TIMEOUT_S": str(deadline_s)}
    for waited in spawn(late, 2, late_s, timeout_s=late_s + 120, env=env):
        # Less a second or so for a machine that let the waiting rank begin late.
        assert min(waited.values()) > 0.9 * late_s - 1.5, waited


def test_slow_is_not_dead():
    check_late(2.0, 60)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_forty_seconds_late():
    """jax #40831: gloo gave up after 30 s, whatever was set."""
    check_late(40, 120)


def ends_while_another_is_frozen(comm):
    """Of a sum for rank 0, rank 1 gives its part and ends its program; rank 2 is frozen by then."""
    total = jax.jit(lambda x: jaxring.reduce(x, comm, root=0))
    x = jnp.ones(1 << 16)
    total(x).block_until_ready()
    if comm.rank == 2:
        freeze = f"sleep 1; kill -STOP {os.getpid()}; sleep 5; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", freeze], start_new_session=True)
    else:
        time.sleep(2.5)
    return float(total(x)[0])


def test_a_rank_that_has_ended_well_is_not_dead():
    assert spawn(ends_while_another_is_frozen, 3) == [3.0, 0.0, 0.0]

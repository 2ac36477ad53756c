"""Elastic training by processes under `jaxring run --restarts`: deaths, freezes, minimum size."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxring
from jaxring.testing import spawn

RANKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "elastic_ranks.py")


class Job:
    """`scenario` of elastic_ranks.py on n ranks, run to its end."""

    def __init__(self, scenario, n, restarts, steps, full, timeout_s=30):
        command = ["-P", "-m", "jaxring", "run", "-n", str(n), "--restarts", str(restarts), RANKS]
        done = subprocess.run(
            [sys.executable, *command, scenario, str(steps), str(full)],
            capture_output=True,
            text=True,
            timeout=170,
            env={**os.environ, "XLA_FLAGS": "", "JAXRING_TIMEOUT_S": str(timeout_s)},
        )
        self.text = done.stdout + done.stderr
        self.code = done.returncode
        lines = [line.partition(" ROW ")[2] for line in done.stdout.splitlines()]
        rows = sorted((json.loads(line) for line in lines if line), key=lambda row: row["slot"])
        self.rows = rows
        self.by_slot = {row["slot"]: row for row in rows}

    def agreed(self, name):
        """What all ranks say alike."""
        values = [row[name] for row in self.rows]
        assert all(value == values[0] for value in values), self.text
        return values[0]


def total_of(worlds):
    """The sum over steps and ranks that elastic_ranks.py makes: 1 + 10 + 100 with three ranks."""
    return sum(sum(10**rank for rank in range(size)) for size in worlds)


def test_a_dead_rank_is_replaced_and_nothing_is_compiled_again():
    job = Job("death", n=3, restarts=1, steps=6, full=3)
    assert job.code == 0, job.text
    # It died when all had made the step, so that the others could go on with it.
    assert job.agreed("worlds") == [3, 3, 3, 2, 2, 3]
    assert job.agreed("total") == total_of([3, 3, 3, 2, 2, 3])
    assert job.agreed("key") == [0, 0]  # a key too is rank 0's
    assert [row["rank"] for row in job.rows] == [0, 2, 1]  # survivors first, in their order
    assert [row["again"] for row in job.rows] == [0, 1, 0]
    assert [job.by_slot[slot]["compiled_later"] for slot in (0, 2)] == [0, 0], job.text
    assert "was killed by SIGKILL; it is started again (0 restarts left)" in job.text


def test_a_frozen_rank_is_left_out_and_comes_back_as_a_new_one():
    job = Job("freeze", n=3, restarts=0, steps=6, full=3, timeout_s=5)
    assert job.code == 0, job.text
    assert job.agreed("worlds") == [3, 3, 3, 2, 2, 3]
    assert job.agreed("total") == total_of([3, 3, 3, 2, 2, 3])
    assert [row["rank"] for row in job.rows] == [0, 1, 2]
    assert all(row["again"] == 0 for row in job.rows)


def test_below_the_minimum_a_survivor_waits_and_gives_its_state():
    """Case 4 of the field, horovod #3494; here rank 0 is the one that died."""
    job = Job("minimum", n=2, restarts=1, steps=5, full=2)
    assert job.code == 0, job.text
    assert job.agreed("worlds") == [2, 2, 2, 2, 2]
    assert job.agreed("total") == total_of([2] * 5)
    assert [(row["rank"], row["again"]) for row in job.rows] == [(1, 1), (0, 0)]
    assert job.agreed("key") == [0, 0]


def test_a_rank_that_raises_leaves_the_others_to_go_on():
    job = Job("raises", n=2, restarts=0, steps=5, full=1)
    assert job.code == 0, job.text
    (row,) = job.rows
    assert (row["slot"], row["worlds"][:2], row["worlds"][3:]) == (0, [2, 2], [1, 1])
    assert "ValueError: this rank's data are bad" in job.text
    assert "no restart is left, the others go on without it" in job.text


def uneven(comm):
    """Rank r has r batches (rank 0 none), in one of which is a NaN that does not count."""
    batches = [np.full(2, 10.0 * comm.rank + i, np.float32) for i in range(comm.rank)]
    seen, means = [], []
    for batch, live in jaxring.elastic.join(batches, comm):
        seen.append((np.asarray(batch).tolist(), float(live)))
        x = jnp.where(live > 0, jnp.asarray(batch), jnp.nan)
        tree = {"a": x, "b": x[0].astype(jnp.bfloat16)}
        means.append(jaxring.elastic.mean_of_live(tree, live, comm))
    return seen, [(np.asarray(m["a"]).tolist(), float(m["b"])) for m in means]


def test_ranks_without_batches_go_on_with_zeros():
    """Case 10 of the field, pytorch #141069, as DDP's and Horovod's joins do it."""
    results = spawn(uneven, 3)
    none = ([0.0, 0.0], 0.0)
    assert results[0][0] == [none, none]
    assert results[1][0] == [([10.0, 10.0], 1.0), none]
    assert results[2][0] == [([20.0, 20.0], 1.0), ([21.0, 21.0], 1.0)]
    for _, means in results:
        assert means == [([15.0, 15.0], 15.0), ([21.0, 21.0], 21.0)]


@pytest.mark.parametrize("sizes", [(0, 0), (2, 2)])
def test_even_batches(sizes):
    """In a world of one, which is joined in this process."""
    comm = jaxring.init(0, 1)
    try:
        batches = [np.ones(3)] * sizes[0]
        got = list(jaxring.elastic.join(batches, comm))
        assert [float(live) for _, live in got] == [1.0] * sizes[0]
    finally:
        comm.close()

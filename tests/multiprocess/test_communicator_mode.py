"""Ranks that are processes, each its own single-process JAX: jaxring.allreduce(x, comm).

Every value is distinct by rank, call and execution, so that a wrong pairing shows as a wrong sum.
Starting processes costs seconds: one spawn runs many checks, each a function named in the error.
"""

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring
from jaxring import errors
from jaxring.testing import spawn

EXECUTIONS = 200
CALLS = 12


def equal(got, expected):
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def numbers(rank, execution, calls=CALLS):
    """One row of four for each call; small enough that float32 sums over a few ranks are exact."""
    row = rank * 1000 + np.arange(calls) * 17 + execution % 50
    return np.repeat(row[:, None], 4, axis=1).astype(np.float32)


def total(comm, execution, calls=CALLS):
    return np.sum([numbers(r, execution, calls) for r in range(comm.world_size)], axis=0)


def check(comm, f, calls=CALLS, executions=EXECUTIONS):
    """`f` takes a list of `calls` rows and gives the sum over ranks of each."""
    jitted = jax.jit(lambda xs: jnp.stack(f(list(xs))))
    for e in range(executions):
        equal(jitted(numbers(comm.rank, e, calls)), total(comm, e, calls))


def independent_calls_of_equal_shape(comm):
    check(comm, lambda xs: [jaxring.allreduce(x, comm) for x in xs])


def one_inner_jit_called_often(comm):
    inner = jax.jit(lambda x: jaxring.allreduce(x, comm))
    check(comm, lambda xs: [inner(x) for x in xs])


def scans(comm):
    def body(carry, x):
        y = jaxring.allreduce(x, comm)
        return carry + y, y

    for unroll in (1, 4):
        f = jax.jit(lambda xs, unroll=unroll: jax.lax.scan(body, xs[0] * 0, xs, unroll=unroll))
        for e in range(EXECUTIONS // 2):
            last, ys = f(numbers(comm.rank, e))
            equal(ys, total(comm, e))
            equal(last, total(comm, e).sum(0))


def loops_and_branches(comm):
    @jax.jit
    def f(x):
        def body(i, x):
            return jax.lax.cond(
                i % 2 == 0,
                lambda x: jaxring.allreduce(x + i, comm, "max"),
                lambda x: jaxring.allreduce(x - i, comm, "min"),
                x,
            )

        return jax.lax.fori_loop(0, 6, body, x)

    def expected(xs):
        for i in range(6):
            xs = [max(xs) + i] * len(xs) if i % 2 == 0 else [min(xs) - i] * len(xs)
        return xs[0]

    for e in range(EXECUTIONS // 4):
        xs = [r * 100.0 + e for r in range(comm.world_size)]
        equal(f(jnp.float32(xs[comm.rank])), expected(xs))


def a_rank_of_its_own_ways(comm):
    """Rank 1 calls from another line, runs programs of its own, and compiles again alone."""
    f = jax.jit(lambda xs: jnp.stack([jaxring.allreduce(x, comm) for x in xs]))
    alone = jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))
    for e in range(EXECUTIONS):
        xs = numbers(comm.rank, e)
        if comm.rank == 1:
            alone(jnp.ones((8, 8))).block_until_ready()
            got = f(xs)
        else:
            got = f(xs)
        if comm.rank == 1 and e in (10, 150):
            jax.clear_caches()
            gc.collect()
        equal(got, total(comm, e))


def a_rank_that_guards_against_nan(comm):
    """Case 13: rank-only work reorders XLA's schedule of equal-shape calls on that rank."""

    def f(xs):
        if comm.rank == 0:
            xs = [jnp.where(jnp.isnan(x), 0.0, x) if i in (3, 7) else x for i, x in enumerate(xs)]
        return [jaxring.allreduce(x * 2, comm) / 2 for x in xs]

    check(comm, f)


def overlapping_communicators(comm):
    """The world, the halves and the pairs of neighbours in one program, without order."""
    half = comm.split(comm.rank % 2, key=-comm.rank)
    again = comm.split("all", key=-comm.rank)
    everyone, mine = range(comm.world_size), range(comm.rank % 2, comm.world_size, 2)
    assert half.world_size == len(mine)
    assert again.rank == comm.world_size - 1 - comm.rank
    assert (again.local_rank, again.local_world_size) == (again.rank, comm.world_size)
    assert comm.split(None if comm.rank else 1) is None or comm.rank == 0
    groups = [(comm, everyone), (half, mine), (again, everyone)]
    f = jax.jit(lambda xs: [jaxring.allreduce(x, c) for x, (c, _) in zip(xs, groups, strict=True)])
    for e in range(EXECUTIONS):
        got = f(numbers(comm.rank, e, 3))
        for c, (_, members) in enumerate(groups):
            equal(got[c], sum(numbers(r, e, 3)[c] for r in members))


def trees_sizes_and_ops(comm):
    n = comm.world_size
    for size in (0, 1000, 300_001):
        tree = {
            "a": jnp.arange(size, dtype=jnp.float32) % 100 + comm.rank,
            "b": (jnp.arange(size, dtype=jnp.int32) * (comm.rank + 1), jnp.bfloat16(comm.rank)),
        }
        for algorithm in ("auto", "ring", "tree", "reducer") if size == 1000 else ("auto",):
            got = jax.jit(lambda t, a=algorithm: jaxring.allreduce(t, comm, algorithm=a))(tree)
            equal(got["a"], (np.arange(size) % 100) * n + sum(range(n)))
            equal(got["b"][0], np.arange(size) * sum(range(1, n + 1)))
            equal(got["b"][1].astype(np.float32), sum(range(n)))
    x = jnp.float32(comm.rank + 1)
    for op, expected in (
        ("mean", (n + 1) / 2),
        ("min", 1),
        ("max", n),
        ("prod", np.prod(range(1, n + 1))),
    ):
        equal(jaxring.allreduce(x, comm, op), expected)


def gradients(comm):
    """The gradient of a mean over all ranks' batches, as a single process computes it."""
    x = np.arange(12.0, dtype=np.float32).reshape(comm.world_size, -1)
    w = jnp.arange(1.0, 1.0 + x.shape[1])

    def loss(w, x):
        return jnp.mean((x * jaxring.reduce_gradients_of(w, comm)) ** 2)

    got = jax.jit(jax.grad(loss))(w, x[comm.rank])
    np.testing.assert_allclose(got, jax.grad(lambda w: jnp.mean((x * w) ** 2))(w), rtol=1e-6)


def counters(comm):
    jaxring.stats(reset=True)
    jaxring.allreduce(jnp.ones(256), comm, algorithm="ring").block_until_ready()
    (row,) = [r for r in jaxring.stats() if r["communicator"] == comm.key]
    assert (row["algorithm"], row["transport"], row["operations"]) == ("ring", "shm", 1)
    n = comm.world_size
    assert row["bytes_sent"] == 2 * (n - 1) * 1024 // n


def a_new_world(comm):
    first = comm.key
    step = jax.jit(lambda x: jaxring.allreduce(x, comm))
    step(jnp.ones(2)).block_until_ready()
    comm.close()
    comm.close()
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as e:
        step(jnp.ones(2)).block_until_ready()
    error = errors.from_exception(e.value)
    assert isinstance(error, jaxring.UsageError), error
    assert "world is closed" in str(error)
    again = jaxring.init()
    assert again is jaxring.init()
    assert again.key != first
    equal(jaxring.allreduce(jnp.float32(again.rank), again), sum(range(again.world_size)))
    again.close()


CHECKS = [
    independent_calls_of_equal_shape,
    one_inner_jit_called_often,
    scans,
    loops_and_branches,
    a_rank_of_its_own_ways,
    a_rank_that_guards_against_nan,
    overlapping_communicators,
    trees_sizes_and_ops,
    gradients,
    counters,
    a_new_world,
]


def run_checks(comm):
    for check in CHECKS:
        start = time.monotonic()
        check(comm)
        print(f"{check.__name__}: right in {time.monotonic() - start:.1f} s", flush=True)


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_right_values(n):
    spawn(run_checks, n, env={"JAXRING_TIMEOUT_S": "30"})


def splits_by_look_alikes(comm):
    color = [1, 1, "1", "1"][comm.rank]
    own = comm.split(color)
    nested = own.split("b")
    slash = comm.split("a/1.'b'" if comm.rank else "a")
    return (
        own.world_size,
        nested.world_size,
        slash.world_size,
        own.key,
        float(jaxring.allreduce(jnp.float32(comm.rank), own)),
    )


def test_colors_that_look_alike():
    """1 and "1" got one name, so that each group mapped the other's memory."""
    results = spawn(splits_by_look_alikes, 4)
    assert [r[:3] for r in results] == [(2, 2, 1), (2, 2, 3), (2, 2, 3), (2, 2, 3)]
    assert [r[4] for r in results] == [1, 1, 5, 5]
    assert results[0][3] != results[2][3]

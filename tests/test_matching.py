"""The engine in one process: whatever order XLA runs calls in, the right ones meet.

Every number is distinct by rank, call and execution, so that a wrong pairing is a wrong value and
not only a hang. What conftest's eight devices can't show runs in a child of its own.
"""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_ranks import Ranks, numbers, over_axes, over_axes_reference, total

import jaxring
from jaxring.testing import spawn

SIZES = (3, 5000, 1)  # with the announcement; one pass over the message; one element
ENV = {"JAXRING_TIMEOUT_S": "30"}


def sums(xs, axis="x", **how):
    return [jaxring.allreduce(x, axis, **how) for x in xs]


# -- One axis --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 8])
def test_independent_calls(n):
    """XLA runs these in another order on each device (facts-cpu.md), in 7 to 14 of 20 runs."""
    ranks = Ranks({"x": n})
    ranks.check(sums, calls=16, executions=200 if n == 2 else 60)
    ranks.check(sums, calls=40, executions=20, in_flight=10)


def test_sizes_and_algorithms_mixed():
    """Calls that need an order of their own between calls that don't."""
    algorithms = ("auto", "ring", "direct", "tree", "reducer")

    def f(xs):
        how = [algorithms[c % 5] for c in range(len(xs))]
        return [jaxring.allreduce(x, "x", algorithm=a) for x, a in zip(xs, how, strict=True)]

    for size in SIZES:
        Ranks({"x": 4}).check(f, calls=15, executions=30, size=size, in_flight=3)


def test_one_inner_jit_called_often():
    """XLA inlines it: 12 instructions with one call index."""
    inner = jax.jit(lambda x: jaxring.allreduce(x, "x"))
    Ranks({"x": 4}).check(lambda xs: [inner(x) for x in xs], calls=12, executions=200, in_flight=5)


def test_scan_unrolled():
    def f(xs):
        def body(carry, x):
            y = jaxring.allreduce(x, "x")
            return carry + y, y

        _, ys = jax.lax.scan(body, xs[0] * 0, jnp.stack(xs), unroll=4)
        return list(ys)

    Ranks({"x": 4}).check(f, calls=12, executions=200, in_flight=5)


def test_inner_jit_in_an_unrolled_scan():
    """Copies of copies, and iterations of each."""
    inner = jax.jit(lambda x: jaxring.allreduce(x, "x"))

    def f(xs):
        def body(_, pair):
            return None, [inner(pair[0]), inner(pair[1])]

        pairs = jnp.stack(xs).reshape(6, 2, -1)
        _, (a, b) = jax.lax.scan(body, None, pairs, unroll=3)
        return list(jnp.stack([a, b], 1).reshape(12, -1))

    Ranks({"x": 3}).check(f, calls=12, executions=60, in_flight=5)


def test_loops():
    """A while loop whose length only the data tells, with independent calls and a loop inside."""

    def f(xs):
        rounds = 1 + jaxring.allreduce(xs[0][0], "x").astype(jnp.int32) % 3

        def step(state):
            i, xs, ys = state
            ys = sums([x + i for x in xs])
            ys = [
                jax.lax.fori_loop(0, 2, lambda j, y: jaxring.allreduce(y, "x", "max"), y)
                for y in ys
            ]
            return i + 1, xs, ys

        return jax.lax.while_loop(lambda s: s[0] < rounds, step, (0, xs, xs))[2]

    def reference(xs):
        last = xs[:, 0, 0].sum().astype(int) % 3
        return total(xs + last)

    Ranks({"x": 4}).check(f, calls=5, executions=60, reference=reference)


def test_programs_and_compilations_between():
    """A launch is known by its place among those of this communicator only."""
    ranks = Ranks({"x": 4})
    other = Ranks({"x": 4}, jax.devices()[4:8]).jit(sums, 2)
    plain = jax.jit(lambda x: x @ x)
    launched = []

    def before(execution):
        plain(jnp.ones((4, 4)))
        launched.append(other(numbers(4, 2, execution, 3)))
        if execution % 20 == 7:
            jax.clear_caches()
            gc.collect()

    ranks.check(sums, calls=6, executions=60, before=before)
    jax.block_until_ready(launched)  # or they would count in a later test


def test_one_lowering_compiled_twice():
    """Two executables of one module: the copies of one must not count for the other."""
    ranks = Ranks({"x": 4})
    inner = jax.jit(lambda x: jaxring.allreduce(x, "x"))
    xs = numbers(4, 6, 0, 3)
    lowered = ranks.jit(lambda xs: [inner(x) for x in xs], 6).lower(xs)
    executables = [lowered.compile(), lowered.compile()]
    for e in range(20):
        xs = numbers(4, 6, e, 3)
        for execute in executables:
            np.testing.assert_array_equal(execute(xs), total(xs))


# -- Several communicators -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4), (3, 2)])
def test_overlapping_communicators(shape):
    """Calls over rows, columns and all devices, without order among them."""
    ranks = Ranks(dict(zip("xy", shape, strict=True)))
    ranks.check(over_axes, 16, 60, over_axes_reference(shape), in_flight=3)
    ranks.check(over_axes, 4, 20, over_axes_reference(shape), size=20_000)


def test_two_threads_on_overlapping_meshes():
    """Devices 2 and 3 belong to both; XLA orders whole launches, we match within them."""
    devices = jax.devices()
    failures = []

    def run(part, axis):
        try:
            ranks = Ranks({axis: 4}, part)
            ranks.check(lambda xs: sums(xs, axis), calls=8, executions=60, in_flight=2)
        except BaseException as e:
            failures.append(e)

    threads = [
        threading.Thread(target=run, args=(devices[:4], "x")),
        threading.Thread(target=run, args=(devices[2:6], "x")),
        threading.Thread(target=run, args=(devices[7:3:-1], "y")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- Devices that disagree -------------------------------------------------------------------------


def raised(f, *args):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(f(*args))
    return jaxring.errors.from_exception(caught.value)


def test_devices_in_different_branches():
    """lax.psum ends the process here. The launch fails, the next one is right."""
    ranks = Ranks({"x": 4})

    def f(xs):
        own = jax.lax.axis_index("x") == 2
        ys = sums(xs[:2])
        return ys + jax.lax.cond(
            own, lambda xs: sums(xs), lambda xs: sums([x + 1 for x in xs]), xs[2:]
        )

    jitted = ranks.jit(f, 4)
    for e in range(3):
        with jaxring.config.override(timeout_s=0.3):
            error = raised(jitted, numbers(4, 4, e, 3))
        assert isinstance(error, jaxring.MismatchError)
        assert "allreduce(sum, float32[3]" in str(error)
        ranks.check(sums, calls=4, executions=3)


def test_a_device_that_skips_a_call():
    """XLA starts a launch when the one before has ended on all devices; the deadline tells."""
    ranks = Ranks({"x": 4})

    def f(xs):
        skips = jax.lax.axis_index("x") == 1
        y = jax.lax.cond(skips, lambda x: x, lambda x: jaxring.allreduce(x, "x"), xs[0])
        return [y, *sums(xs[1:])]

    jitted = ranks.jit(f, 2)
    with jaxring.config.override(timeout_s=0.5):
        for output in [jitted(numbers(4, 2, e, 3)) for e in range(2)]:
            error = raised(output.block_until_ready)
            assert isinstance(error, jaxring.TimeoutError)
            assert error.missing_ranks == (1,)
            assert "missing rank 1" in str(error)
    ranks.check(sums, calls=4, executions=3)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "direct"])
def test_a_launch_that_fails_in_the_middle_of_a_message(algorithm):
    """What it left behind must not reach the next launch. (Found here: it did, silently.)"""
    ranks = Ranks({"x": 4})
    several = ranks.jit(lambda xs: sums(xs, algorithm=algorithm), 6)
    one = ranks.jit(lambda xs: sums(xs, algorithm=algorithm), 1)
    xs = numbers(4, 6, 0, 1_000_000)
    failures = 0
    for attempt in range(60):
        try:
            with jaxring.config.override(timeout_s=0.002 * (1 + attempt % 8)):
                jax.block_until_ready(several(xs))
        except jax.errors.JaxRuntimeError:
            failures += 1
            ys = xs[:, :1] + failures
            np.testing.assert_array_equal(one(ys), total(ys))
        if failures == 4:
            break
    assert failures > 0


# -- In a child ------------------------------------------------------------------------------------


def on_sixteen_devices(_, executions):
    ranks = Ranks({"x": 16})
    ranks.check(sums, calls=16, executions=executions, in_flight=5)
    inner = jax.jit(lambda x: jaxring.allreduce(x, "x"))
    ranks.check(lambda xs: [inner(x) for x in xs], calls=12, executions=executions)
    ranks.check(lambda xs: sums(xs, algorithm="ring"), 2, executions // 4, size=5000)
    grid = Ranks({"x": 4, "y": 4})
    grid.check(over_axes, 8, executions, over_axes_reference((4, 4)))


def test_sixteen_devices():
    spawn(on_sixteen_devices, 1, 200, devices=16, env=ENV)

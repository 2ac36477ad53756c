"""The engine between processes: ranks that compile, schedule and launch differently still pair the
right calls, and ranks that call different things all raise.

Every number is distinct by rank, call and execution, so that a wrong pairing is a wrong value.
Starting processes costs seconds: one spawn runs several checks.
"""

import gc
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_ranks import AT_LEAST, Ranks, numbers, over_axes, over_axes_reference, total

import jaxring
from jaxring.testing import spawn

ENV = {"JAXRING_TIMEOUT_S": "40"}


def sums(comm, xs, **how):
    return [jaxring.allreduce(x, comm, **how) for x in xs]


def check(comm, f, calls, executions, size=3, in_flight=1, before=None):
    """Compares `f` of a list of rows with their sums over ranks, `in_flight` launches at a time."""
    executions = max(executions, AT_LEAST)
    jitted = jax.jit(lambda xs: jnp.stack(f(list(xs))))
    for first in range(0, executions, in_flight):
        batch = range(first, min(first + in_flight, executions))
        outputs = []
        for e in batch:
            if before is not None:
                before(e)
            outputs.append(jitted(numbers(comm.world_size, calls, e, size)[comm.rank]))
        for e, ys in zip(batch, outputs, strict=True):
            expected = numbers(comm.world_size, calls, e, size).sum(0)
            np.testing.assert_array_equal(ys, expected, err_msg=f"execution {e}")


def run_all(comm, *checks, executions):
    for run in checks:
        start = time.monotonic()
        run(comm, executions)
        print(f"{run.__name__}: right in {time.monotonic() - start:.1f} s", flush=True)


# -- Communicator mode -----------------------------------------------------------------------------


def independent_calls(comm, executions):
    check(comm, lambda xs: sums(comm, xs), 16, executions)
    check(comm, lambda xs: sums(comm, xs), 40, executions // 5, in_flight=10)


def algorithms_mixed(comm, executions):
    """Calls that take their turn in the leader's order between calls that need no order."""
    names = ("auto", "ring", "direct", "tree", "reducer")

    def f(xs):
        how = [names[c % 5] for c in range(len(xs))]
        return [jaxring.allreduce(x, comm, algorithm=a) for x, a in zip(xs, how, strict=True)]

    for size in (1, 3, 7000):
        check(comm, f, 10, executions // 8, size=size, in_flight=2)


def copies(comm, executions):
    """An inner jit called 12 times, scan(unroll=4), and one in the other."""
    inner = jax.jit(lambda x: jaxring.allreduce(x, comm))

    def scanned(xs):
        def body(_, x):
            return None, inner(x)

        return list(jax.lax.scan(body, None, jnp.stack(xs), unroll=4)[1])

    check(comm, lambda xs: [inner(x) for x in xs], 12, executions, in_flight=3)
    check(comm, scanned, 12, executions, in_flight=3)


def loops(comm, executions):
    """Every rank makes as many rounds as the data says, with independent calls in each."""

    def f(xs):
        rounds = 1 + jaxring.allreduce(xs[0][0], comm).astype(jnp.int32) % 3

        def step(state):
            i, _ = state
            return i + 1, sums(comm, [x * (i == rounds - 1) for x in xs])

        return jax.lax.while_loop(lambda s: s[0] < rounds, step, (0, xs))[1]

    check(comm, f, 5, executions // 4)


def own_ways(comm, executions):
    """Rank 1 calls from another line, runs and compiles other programs, and recompiles alone."""
    alone = comm.split(comm.rank)
    f = jax.jit(lambda xs: jnp.stack(sums(comm, xs)))
    odd = comm.rank == 1

    def other_programs(e):
        jnp.sin(jnp.ones((8, 8 + e % 3))).block_until_ready()
        y = jax.jit(lambda x: jaxring.allreduce(x, alone) + e)(jnp.float32(e))
        np.testing.assert_array_equal(y, 2 * e)

    for e in range(executions):
        xs = numbers(comm.world_size, 6, e)
        if odd and e % 9 == 2:
            other_programs(e)
        if odd and e % 50 == 7:
            jax.clear_caches()
            gc.collect()
        if odd:
            ys = f(xs[comm.rank])
        else:
            ys = f(xs[comm.rank])
        np.testing.assert_array_equal(ys, xs.sum(0))


def compiling_threads(comm, executions):
    """Rank 0 compiles programs with copies in other threads while it compiles the common one."""
    alone = comm.split(comm.rank)
    stop = threading.Event()
    inner = jax.jit(lambda x: jaxring.allreduce(x, comm))
    inner_alone = jax.jit(lambda x: jaxring.allreduce(x, alone))

    def compile_others():
        # A new function each time. jax.clear_caches() would do too, but it makes the common trace
        # forget its inner jit half-way, so that this rank's program is another one.
        while not stop.is_set():

            @jax.jit
            def three_copies(x):
                return [inner_alone(x), inner_alone(x + 1), inner_alone(x + 2)]

            three_copies.lower(jnp.float32(0)).compile()

    threads = [threading.Thread(target=compile_others) for _ in range(2)]
    if comm.rank == 0:
        for thread in threads:
            thread.start()
    try:
        for _ in range(3):
            check(comm, lambda xs: [inner(x) for x in xs], 12, executions // 10)
    finally:
        stop.set()
        for thread in threads[: 2 * (comm.rank == 0)]:
            thread.join()


def guards_against_nan(comm, executions):
    """Case 13: work of one rank only permutes XLA's schedule of its equal-shape calls."""
    for trial in range(3):
        random = np.random.default_rng(100 * trial + comm.rank)
        guarded = set(random.choice(12, random.integers(0, 5), replace=False).tolist())
        busy = set(random.choice(12, random.integers(0, 4), replace=False).tolist())

        def f(xs, guarded=guarded, busy=busy):
            grads = []
            for i, x in enumerate(xs):
                g = jnp.where(jnp.isnan(x), 0.0, x) if i in guarded else x
                grads.append(g + jnp.zeros((7, 7)).at[0, 0].set(x[0]).sum() * 0 if i in busy else g)
            return sums(comm, grads)

        check(comm, f, 12, executions // 5)


def overlapping_communicators(comm, executions):
    """The world, both halves and a reversed world in one program, without order among them."""
    n = comm.world_size
    half, again = comm.split(comm.rank % 2, key=-comm.rank), comm.split("all", key=-comm.rank)
    members = [range(n), range(comm.rank % 2, n, 2), range(n)]
    comms = [comm, half, again]
    f = jax.jit(lambda xs: [jaxring.allreduce(x, comms[c % 3]) for c, x in enumerate(xs)])
    for e in range(executions):
        xs = numbers(n, 9, e)
        for c, y in enumerate(f(list(xs[comm.rank]))):
            np.testing.assert_array_equal(y, xs[list(members[c % 3]), c].sum(0))


def two_threads(comm, executions):
    """Each thread has communicators of its own; nothing orders one thread after the other."""
    parts = [comm.split(f"thread {i}", key=comm.rank * (-1) ** i) for i in range(4)]
    failures = []

    def run(a, b):
        try:
            f = jax.jit(lambda xs: sums(a, xs[:4]) + sums(b, xs[4:], algorithm="ring"))
            for e in range(executions // 2):
                xs = numbers(comm.world_size, 8, e, 500)
                ys = f(list(xs[comm.rank]))
                np.testing.assert_array_equal(ys, xs.sum(0))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=run, args=parts[i : i + 2]) for i in (0, 2)]
    for thread in threads if comm.rank % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


COMMUNICATOR_CHECKS = [
    independent_calls,
    algorithms_mixed,
    copies,
    loops,
    own_ways,
    compiling_threads,
    guards_against_nan,
    overlapping_communicators,
    two_threads,
]


def in_communicator_mode(comm, executions):
    run_all(comm, *COMMUNICATOR_CHECKS, executions=executions)


@pytest.mark.slow
def test_communicator_mode():
    spawn(in_communicator_mode, 3, 60, env=ENV)


def with_many_processes(comm, executions):
    """Four processes for each core of the machine that this was written on."""
    run_all(comm, independent_calls, guards_against_nan, two_threads, executions=executions)


@pytest.mark.slow
def test_eight_processes():
    spawn(with_many_processes, 8, 15, env=ENV)


def with_a_compilation_cache(comm, folder):
    """Rank 1 loads what an earlier process compiled; the order of copies must be the same."""
    if comm.rank == 1:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    copies(comm, 30)
    return len(os.listdir(folder))


def test_one_rank_has_a_compilation_cache(tmp_path):
    _, first = spawn(with_a_compilation_cache, 2, str(tmp_path), env=ENV)
    _, second = spawn(with_a_compilation_cache, 2, str(tmp_path), env=ENV)
    assert first == second > 0


# -- Meshes over processes -------------------------------------------------------------------------


def on_meshes(comm, executions):
    one_axis = Ranks({"x": jax.device_count()})
    inner = jax.jit(lambda x: jaxring.allreduce(x, "x"))
    one_axis.check(lambda xs: sums("x", xs), 16, executions, in_flight=4)
    one_axis.check(lambda xs: [inner(x) for x in xs], 12, executions, in_flight=2)
    one_axis.check(lambda xs: sums("x", xs, algorithm="ring"), 4, executions // 8, size=5000)
    shape = (2, jax.device_count() // 2)
    strided = sorted(jax.devices(), key=lambda d: (d.id % 2048, d.process_index))
    for devices in (None, strided):
        grid = Ranks(dict(zip("xy", shape, strict=True)), devices)
        grid.check(over_axes, 16, executions // 2, over_axes_reference(shape), in_flight=4)


def on_meshes_in_own_ways(comm, executions):
    """Process 1 launches from another line, runs meshes of its own devices, and recompiles."""
    ranks = Ranks({"x": jax.device_count()})
    local = Ranks({"y": jax.local_device_count()}, jax.local_devices())
    jitted = ranks.jit(lambda xs: sums("x", xs), 6)
    odd = comm.rank == 1
    for e in range(executions):
        xs = numbers(ranks.size, 6, e)
        if odd and e % 7 == 1:
            local.check(lambda xs: sums("y", xs), 4, 2)
        if odd and e % 25 == 9:
            jax.clear_caches()
        if odd:
            ys = jitted(ranks.put(xs))
        else:
            ys = jitted(ranks.put(xs))
        for shard in ys.addressable_shards:
            np.testing.assert_array_equal(shard.data, total(xs)[shard.index])


def meshes(comm, executions):
    run_all(comm, on_meshes, on_meshes_in_own_ways, executions=executions)


@pytest.mark.parametrize(("n", "devices"), [pytest.param(2, 2, marks=pytest.mark.slow), (3, 2)])
def test_meshes(n, devices):
    spawn(meshes, n, 25, devices=devices, distributed=True, env=ENV)


def threads_named(name):
    count = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as f:
            count += f.read().strip() == name
    return count


def with_one_thread(comm, executions):
    """Unordered calls of two axes on XLA's pool of one thread: who blocks it never gets further."""
    ranks = Ranks({"x": 2, "y": 2})
    ranks.check(over_axes, 16, executions, over_axes_reference((2, 2)), in_flight=4)
    ranks.check(over_axes, 8, executions // 10, over_axes_reference((2, 2)), size=20_000)
    assert threads_named("tf_XLAEigen") == 1
    independent_calls(comm, executions // 2)


def test_pool_of_one_thread():
    """XLA's pool has as many threads as NPROC says, but at least one for each device."""
    spawn(with_one_thread, 4, 60, distributed=True, env={**ENV, "NPROC": "1"})


# -- Ranks that differ -----------------------------------------------------------------------------

CALLS = 8


def differing(comm, what):
    """A program of equal-shape calls, of which rank 1 makes #5 differently."""
    odd = comm.rank == 1

    def f(xs):
        ys = []
        for i, x in enumerate(xs):
            if odd and i == 5 and what == "call left out":
                continue
            if odd and i == 5 and what == "shape":
                x = x[:2]
            if odd and i == 5 and what == "dtype":
                x = x.astype(jnp.int32)
            op = "max" if odd and i == 5 and what == "op" else "sum"
            ys.append(jaxring.allreduce(x, comm, op).astype(jnp.float32).sum())
        return ys

    return jax.jit(f)


def typed_error(f, *args):
    """(kind, message). jit's C++ path, from the second launch on, makes it a ValueError when the
    program runs on the calling thread, as XLA:CPU's small ones of one device do."""
    try:
        jax.block_until_ready(f(*args))
    except (jax.errors.JaxRuntimeError, ValueError) as e:
        error = jaxring.errors.from_exception(e)
        return type(error).__name__, str(error)
    return None


def a_large_tree(comm):
    """Signatures that name hundreds of leaves, of which one differs."""
    tree: list[np.ndarray] = [np.ones(3 + i, np.float32) for i in range(400)]
    if comm.rank == 0:
        tree[250] = np.ones((1, 253), np.float32)
    return typed_error(jax.jit(lambda t: jaxring.allreduce(t, comm)), tree)


def differ(comm):
    """(what, number of launches before, error) on this rank; each time in a new world."""
    errors = []
    launches = 0
    for what in ("shape", "dtype", "op", "call left out"):
        f = differing(comm, what)
        xs = list(numbers(comm.world_size, CALLS, 0, 4)[comm.rank])
        # All raise in the same launch, or a rank that has nothing left to wait for in its next.
        for _ in range(2):
            if (error := typed_error(f, xs)) is not None:
                break
        errors.append((what, launches, error))
        comm.close()
        comm = jaxring.init()
        launches = 3
        check(comm, lambda xs, comm=comm: sums(comm, xs), 4, launches)
    return errors, a_large_tree(comm)


@pytest.fixture(scope="module")
def different_ranks():
    return spawn(differ, 3, env={"JAXRING_TIMEOUT_S": "20"})


def test_long_signatures_show_where_they_differ(different_ranks):
    for _, error in different_ranks:
        assert error is not None
        kind, message = error
        assert kind == "MismatchError"
        assert "float32[1,253]" in message
        assert "float32[253]" in message
        assert len(message) < 2000


def test_ranks_that_differ(different_ranks):
    for errors, _ in different_ranks:
        for what, launch, error in errors:
            assert error is not None, what
            kind, message = error
            assert kind == "MismatchError", message
            if what == "call left out":
                assert f"allreduce #{CALLS - 1} of launch {launch}: allreduce(sum" in message
                continue
            assert f"#5 of launch {launch}: allreduce(sum, float32[4]" in message
            other = {"shape": "sum, float32[2]", "dtype": "sum, int32[4]", "op": "max, float32[4]"}
            ours = f"rank 1: allreduce #5 of launch {launch}: allreduce({other[what]}"
            assert ours in message


def skips_and_ends(comm):
    """Rank 2 never makes the last call: the others' deadline ends it."""
    f = jax.jit(lambda xs: sums(comm, xs[: len(xs) - (comm.rank == 2)]))
    begin = time.monotonic()
    error = typed_error(f, list(numbers(comm.world_size, 4, 0)[comm.rank]))
    waited_s = time.monotonic() - begin
    if comm.rank == 2:
        time.sleep(2)
    return error, waited_s


def test_a_rank_that_skips_a_call():
    results = spawn(skips_and_ends, 3, env={"JAXRING_TIMEOUT_S": "1.5"})
    assert results[2][0] is None
    for error, waited_s in results[:2]:
        assert error is not None
        kind, message = error
        assert kind == "TimeoutError"
        assert "call #3 of launch 0" in message
        assert "missing rank 2" in message
        assert waited_s < 15


def differ_on_a_mesh(comm):
    """Each process compiles another program for the same mesh."""
    devices = jax.devices()
    errors = []
    for what in ("op", "order"):
        ranks = Ranks({"x": len(devices)}, devices)
        devices = devices[1:] + devices[:1]  # the next one is another communicator
        op = "max" if comm.rank == 1 else "sum"

        def f(xs, what=what, op=op):
            ops = ["sum", op, "sum"] if what == "op" else [op, "sum" if op == "max" else "max"]
            return [jaxring.allreduce(x, "x", o) for x, o in zip(xs, ops, strict=True)]

        calls = 3 if what == "op" else 2
        errors.append(typed_error(ranks.jit(f, calls), ranks.put(numbers(ranks.size, calls, 0))))
    return errors


def test_meshes_that_differ():
    env = {"JAXRING_TIMEOUT_S": "20"}
    for errors in spawn(differ_on_a_mesh, 2, devices=2, distributed=True, env=env):
        for error in errors:
            assert error is not None
            kind, message = error
            assert kind == "MismatchError"
            assert "allreduce(sum, float32[3]" in message
            assert "allreduce(max, float32[3]" in message

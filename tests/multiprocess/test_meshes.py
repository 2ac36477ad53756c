"""Meshes over several processes that jax.distributed has joined: axis names, no init() needed."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxring
from jaxring.testing import spawn

EXECUTIONS = 100


def mesh_of(devices, **axes):
    shape = tuple(axes.values())
    types = (AxisType.Auto,) * len(axes)
    return jax.sharding.Mesh(np.array(devices).reshape(shape), tuple(axes), axis_types=types)


def on(mesh, rows):
    """A global array with one of `rows` for each device, in the mesh's order."""
    rows = np.asarray(rows, np.float32)
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def local(x):
    """{row: values} of this process's rows."""
    return {s.index[0].start or 0: np.asarray(s.data)[0] for s in x.addressable_shards}


def rows_of(mesh, f):
    spec = P(mesh.axis_names)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def check(mesh, f, reference, calls=1, size=3, executions=EXECUTIONS):
    """f of several rows, one list per device, against `reference` of the array (device, call,
    size)."""
    n = mesh.devices.size
    jitted = rows_of(mesh, lambda x: jnp.stack(f([x[0, c] for c in range(calls)]))[None])
    for e in range(executions):
        grid = np.arange(n)[:, None] * 1000 + np.arange(calls) * 17 + e
        xs = np.broadcast_to(grid[..., None], (n, calls, size)).astype(np.float32)
        expected = reference(xs)
        for row, got in local(jitted(on(mesh, xs))).items():
            np.testing.assert_array_equal(got, expected[row])


def total(xs):
    return np.broadcast_to(xs.sum(0), xs.shape)


def one_axis(comm):
    del comm
    mesh = mesh_of(jax.devices(), x=-1)
    check(mesh, lambda xs: [jaxring.allreduce(x, "x") for x in xs], total, calls=12)


def permuted_devices(comm):
    """Ranks of the two processes alternate; rank 0 lies in the last process."""
    del comm
    devices = sorted(jax.devices(), key=lambda d: (d.id % 2048, -d.process_index))
    mesh = mesh_of(devices, x=-1)
    check(mesh, lambda xs: [jaxring.allreduce(x, "x") for x in xs], total, calls=3)


def two_axes_unordered(comm):
    """Groups within a process, across processes and over all, in one program."""
    processes = comm.world_size
    mesh = mesh_of(jax.devices(), p=processes, d=-1)
    axes = ["p", "d", ("p", "d"), ("d", "p")] * 2

    def reference(xs):
        grid = xs.reshape(processes, -1, *xs.shape[1:])
        sums = {"p": grid.sum(0, keepdims=True), "d": grid.sum(1, keepdims=True)}
        out = np.empty_like(grid)
        for c, axis in enumerate(axes):
            by = sums.get(axis, grid.sum((0, 1), keepdims=True))
            out[:, :, c] = np.broadcast_to(by, grid.shape)[:, :, c]
        return out.reshape(xs.shape)

    f = lambda xs: [jaxring.allreduce(x, a) for x, a in zip(xs, axes, strict=True)]  # noqa: E731
    check(mesh, f, reference, calls=len(axes))


def subset_of_devices(comm):
    """Only the first device of each process; the others' communicators stay what they are."""
    del comm
    first = [d for d in jax.devices() if d.id % 2048 == 0]
    mesh = mesh_of(first, x=-1)
    check(mesh, lambda xs: [jaxring.allreduce(x, "x") for x in xs], total, calls=2)


def programs_of_one_process_between(comm):
    """Process 1 compiles and runs meshes of its own devices between the common steps."""
    own = mesh_of(jax.local_devices(), y=-1)
    mesh = mesh_of(jax.devices(), x=-1)
    for size in (1, 2, 5):
        if comm.rank == 1:
            alone = rows_of(own, lambda x: jaxring.allreduce(x, "y") + 0.0)
            rows = np.arange(own.devices.size * size, dtype=np.float32).reshape(-1, size)
            for got in local(alone(on(own, rows))).values():
                np.testing.assert_array_equal(got, rows.sum(0))
        check(mesh, lambda xs: [jaxring.allreduce(x, "x") for x in xs], total, 2, size, 20)


def uneven_groups(comm):
    """Groups that don't lie along processes: the first device, and all others."""
    del comm
    n = jax.device_count()
    mesh = mesh_of(jax.devices(), x=-1)
    groups = [[0], list(range(1, n))]

    def reference(xs):
        out = total(xs[1:])
        return np.concatenate([xs[:1], out])

    f = lambda xs: [jaxring.allreduce(x, "x", axis_index_groups=groups) for x in xs]  # noqa: E731
    check(mesh, f, reference, calls=2, executions=20)


def algorithms_and_sizes(comm):
    del comm
    mesh = mesh_of(jax.devices(), x=-1)
    for algorithm in ("direct", "ring", "tree", "halving_doubling", "chain", "reducer"):
        jaxring.stats(reset=True)
        for size in (1, 1000, 100_003):
            f = lambda xs, a=algorithm: [jaxring.allreduce(x, "x", algorithm=a) for x in xs]  # noqa: E731
            check(mesh, f, total, size=size, executions=3)
        assert {row["algorithm"] for row in jaxring.stats() if row["operations"]} == {algorithm}


def whole_family(comm):
    """Every collective over all devices, on values distinct by rank, row and place."""
    del comm
    n = jax.device_count()
    mesh = mesh_of(jax.devices(), x=-1)
    shift = [(i, (i + 1) % n) for i in range(n)]
    first_to_last = [(0, n - 1)]
    for size in (3, 30_001):  # within an announcement, and by FIFOs

        def family(x):  # x: (1, n, size)
            rows, own = x[0], x[0, 0]
            results = [
                jaxring.reduce_scatter(rows, "x"),
                jaxring.reduce_scatter(rows, "x", algorithm="ring"),
                jaxring.all_gather(own, "x"),
                jaxring.all_gather(own, "x", algorithm="ring"),
                jaxring.all_to_all(rows, "x", 0, 0),
                jaxring.broadcast(own, "x", root=n - 1),
                jaxring.reduce(own, "x", "max", root=1),
                jaxring.ppermute(own, "x", shift),
                jaxring.ppermute(own, "x", first_to_last),
                jaxring.barrier("x", own),
            ]
            return jnp.concatenate([r.reshape(-1) for r in results])[None]

        xs = np.random.default_rng(0).integers(-999, 999, (n, n, size)).astype(np.float32)
        zero = np.zeros_like(xs[0, 0])
        expected = [
            np.concatenate(
                [
                    xs[:, r].sum(0),
                    xs[:, r].sum(0),
                    xs[:, 0].reshape(-1),
                    xs[:, 0].reshape(-1),
                    xs[:, r].reshape(-1),
                    xs[n - 1, 0],
                    xs[:, 0].max(0) if r == 1 else zero,
                    xs[r - 1, 0],
                    xs[0, 0] if r == n - 1 else zero,
                    xs[r, 0],
                ]
            )
            for r in range(n)
        ]
        jitted = rows_of(mesh, family)
        for _ in range(10):
            for row, got in local(jitted(on(mesh, xs))).items():
                np.testing.assert_array_equal(got, expected[row])


def with_communicator_mode(comm):
    """Both kinds side by side: the world of processes and the mesh of devices."""
    one_axis(comm)
    got = jaxring.allreduce(jnp.float32(comm.rank), comm)
    np.testing.assert_array_equal(got, sum(range(comm.world_size)))


CHECKS = [
    one_axis,
    permuted_devices,
    two_axes_unordered,
    subset_of_devices,
    programs_of_one_process_between,
    uneven_groups,
    algorithms_and_sizes,
    whole_family,
    with_communicator_mode,
]


def run_checks(comm):
    for run in CHECKS:
        start = time.monotonic()
        run(comm)
        print(f"{run.__name__}: right in {time.monotonic() - start:.1f} s", flush=True)


@pytest.mark.parametrize(("n", "devices"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_right_values(n, devices):
    env = {"JAXRING_TIMEOUT_S": "30"}
    spawn(run_checks, n, devices=devices, distributed=True, env=env)


def fails_and_rejoins(comm, cycles):
    """Rank 1 comes late and once more in time; the program is compiled once."""
    mesh = mesh_of(jax.devices(), x=-1)
    traces = []
    jitted = rows_of(mesh, lambda x: (traces.append(x.shape), jaxring.allreduce(x, "x"))[1])
    rows = np.arange(mesh.devices.size, dtype=np.float32)[:, None] * np.ones(20_000, np.float32)
    x, total = on(mesh, rows), rows.sum(0)
    jitted(x).block_until_ready()
    kinds = []
    for _ in range(cycles):
        with jaxring.config.override(timeout_s=1.0):
            if comm.rank == 1:
                time.sleep(2.5)
            try:
                jitted(x).block_until_ready()
            except (jax.errors.JaxRuntimeError, ValueError) as e:
                error = jaxring.errors.from_exception(e)
                assert isinstance(error, jaxring.Error), error
                kinds.append((type(error).__name__, error.missing_ranks))
        jaxring.rejoin()
        for got in local(jitted(x)).values():
            np.testing.assert_array_equal(got, total)
    with open("/proc/self/maps") as f:
        segments = len({line.split()[4] for line in f if "memfd:jaxring" in line})
    return kinds, segments, len(traces)


def rejoins_again_and_again(comm):
    """Without launches between: what an overtaken joining does must not reach the next one's."""
    mesh = mesh_of(jax.devices(), x=-1)
    jitted = rows_of(mesh, lambda x: jaxring.allreduce(x, "x"))
    x = on(mesh, np.ones((mesh.devices.size, 3)))
    for _ in range(3):
        for _ in range(20):
            jaxring.rejoin()
        for got in local(jitted(x)).values():
            np.testing.assert_array_equal(got, np.full(3, 2.0))
    if comm.rank == 0:
        jaxring.rejoin()  # and ends while it is still being joined, which must not be an abort
    return True


def rejoins(comm):
    return fails_and_rejoins(comm, 3), rejoins_again_and_again(comm)


def test_meshes_can_be_joined_anew():
    env = {"JAXRING_TIMEOUT_S": "30"}
    for (kinds, segments, compiled), again in spawn(rejoins, 2, distributed=True, env=env):
        assert kinds == [("TimeoutError", (1,))] * 3
        assert segments == 2  # spawn's own world has one
        assert compiled == 1
        assert again

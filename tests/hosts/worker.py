"""What a rank of tests/hosts does: `python worker.py NAME [ARGUMENTS]`."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxring

ALLREDUCES = (
    "auto",
    "direct",
    "ring",
    "tree",
    "halving_doubling",
    "chain",
    "reducer",
    "hierarchical",
)


def operands(comm, count, dtype=np.float32):
    """Of all ranks: small integers, so that sums are exact in any order."""
    rows = [(np.arange(count) * (r + 3) + r * 7) % 11 - 3 for r in range(comm.world_size)]
    return [row.astype(dtype) for row in rows]


def check(comm, name, got, expected):
    np.testing.assert_array_equal(
        np.asarray(got), expected, err_msg=f"{name} on rank {comm.rank} of {comm.world_size}"
    )


def family(comm):
    """Every collective, every algorithm, from what travels with its announcement to many slices."""
    p = comm.world_size
    root, perm = p - 1, [(r, (r + 1) % p) for r in range(p)]
    for count in (1, 24 * p, 9000 * p, 100_001):
        xs = operands(comm, count)
        x, total = jnp.asarray(xs[comm.rank]), np.sum(xs, axis=0)
        for algorithm in ALLREDUCES:
            f = jax.jit(lambda x, a=algorithm: jaxring.allreduce(x, comm, algorithm=a))
            check(comm, f"allreduce {algorithm} {count}", f(x), total)
        check(comm, "max", jax.jit(lambda x: jaxring.allreduce(x, comm, "max"))(x), np.max(xs, 0))
        half = jax.jit(lambda x: jaxring.allreduce(x.astype(jnp.bfloat16), comm))(x)
        check(comm, "bfloat16", half.astype(jnp.float32), total)
        check(comm, "broadcast", jax.jit(lambda x: jaxring.broadcast(x, comm, root))(x), xs[root])
        reduced = jax.jit(lambda x: jaxring.reduce(x, comm, root=root))(x)
        check(comm, "reduce", reduced, total if comm.rank == root else 0 * total)
        gathered = jax.jit(lambda x: jaxring.all_gather(x, comm))(x)
        check(comm, "all_gather", gathered, np.stack(xs))
        permuted = jax.jit(lambda x: jaxring.ppermute(x, comm, perm))(x)
        check(comm, "ppermute", permuted, xs[(comm.rank - 1) % p])
        if count % p:
            continue
        blocks = [x.reshape(p, -1) for x in xs]
        scattered = jax.jit(lambda x: jaxring.reduce_scatter(x.reshape(p, -1), comm))(x)
        check(comm, "reduce_scatter", scattered, np.sum(blocks, axis=0)[comm.rank])
        turned = jax.jit(lambda x: jaxring.all_to_all(x.reshape(p, -1), comm, 0, 0))(x)
        check(comm, "all_to_all", turned, np.stack([b[comm.rank] for b in blocks]))
    jaxring.barrier(comm)
    assert comm.all_gather_object(comm.rank) == list(range(p))
    print("transport", {row["transport"] for row in jaxring.stats()})
    print("hosts", *comm.hosts)
    halves = comm.split(comm.rank % 2)
    got = jaxring.allreduce(jnp.float32(comm.rank), halves)
    check(comm, "split", got, np.float32(sum(range(comm.rank % 2, p, 2))))


def mesh(_):
    """A mesh over the processes of several hosts, under jax.distributed."""
    mesh = jax.make_mesh((jax.device_count(),), ("dp",))
    sharding = jax.NamedSharding(mesh, jax.P("dp"))
    for count in (1, 30_000):
        rows = np.arange(jax.device_count() * count, dtype=np.float32).reshape(-1, count) % 13
        x = jax.make_array_from_callback(rows.shape, sharding, lambda index, rows=rows: rows[index])
        f = jax.shard_map(
            lambda x: jaxring.allreduce(x, "dp"), mesh=mesh, in_specs=jax.P("dp"), out_specs=jax.P()
        )
        (got,) = jax.jit(f)(x).addressable_data(0)
        np.testing.assert_array_equal(np.asarray(got), rows.sum(0))
    print("transport", {row["transport"] for row in jaxring.stats()})


def mismatch(comm):
    """Ranks differ in shape: both signatures, on all."""
    try:
        jaxring.allreduce(jnp.ones(4 if comm.rank == 0 else 8), comm)
    except Exception as e:
        print("error", repr(e))


def loop(comm, count="300000"):
    """Until an error comes: says when and which."""
    x = jnp.ones(int(count), jnp.float32)
    f = jax.jit(lambda x: jaxring.allreduce(x, comm, "mean"))
    f(x).block_until_ready()
    print("running", flush=True)
    try:
        while True:
            x = f(x)
            x.block_until_ready()
    except Exception as e:
        print("error", time.monotonic(), type(jaxring.errors.from_exception(e)).__name__, repr(e))


def wire(comm, count, repeats):
    """What this host's link has sent for each operation: bytes, and milliseconds."""
    blocks = jnp.ones((comm.world_size, int(count) // comm.world_size), jnp.float32)
    calls = {
        "allreduce": (jaxring.allreduce, blocks),
        "all_gather": (jaxring.all_gather, blocks[0]),
        "reduce_scatter": (jaxring.reduce_scatter, blocks),
    }
    for name, (call, x) in calls.items():
        f = jax.jit(lambda x, call=call: call(x, comm))
        f(x).block_until_ready()
        jaxring.barrier(comm)
        begin, before = time.monotonic(), sent_bytes()
        jaxring.barrier(comm)  # nobody begins before all have looked
        for _ in range(int(repeats)):
            f(x).block_until_ready()
        jaxring.barrier(comm)
        each_ms = 1e3 * (time.monotonic() - begin) / int(repeats)
        print("sent", name, (sent_bytes() - before) / int(repeats), each_ms, flush=True)
        jaxring.barrier(comm)


def sent_bytes():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def elastic(_):
    """Training whose rank on host 1 dies once and is started again: the sum of 40 means of ones."""
    step = jax.jit(
        lambda comm, total: total + jaxring.allreduce(jnp.ones(()), comm, "mean"), static_argnums=0
    )

    @jaxring.elastic.run(min_ranks=2)
    def train(state, comm):
        while state.step < 40:
            doomed = comm.rank == 1 and "JAXRING_RESTART" not in os.environ
            if doomed and state.step == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            state.total = step(comm, state.total)
            state.step += 1
            if state.step % 10 == 0:
                state.commit()
        print("finished", float(state.total), *comm.hosts, flush=True)

    train(jaxring.elastic.State(step=0, total=jnp.zeros(())))


def speed(comm, count, repeats):
    """Milliseconds of an allreduce of `count` float32, by the slowest rank."""
    x = jnp.ones(int(count), jnp.float32)
    f = jax.jit(lambda x: jaxring.allreduce(x, comm))
    f(x).block_until_ready()
    jaxring.barrier(comm)
    begin = time.monotonic()
    for _ in range(int(repeats)):
        f(x).block_until_ready()
    each_s = (time.monotonic() - begin) / int(repeats)
    print("ms", 1e3 * max(comm.all_gather_object(each_s)), flush=True)


if __name__ == "__main__":
    # A mesh needs no communicator of ours, and elastic.run makes its own.
    made = contextlib.nullcontext() if sys.argv[1] in ("mesh", "elastic") else jaxring.init()
    with made as comm:
        globals()[sys.argv[1]](comm, *sys.argv[2:])

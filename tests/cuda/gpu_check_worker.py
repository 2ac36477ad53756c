"""One process of gpu_check.py's checks with JAX. Prints one JSON object a line.

    gpu_check_worker.py processes RANK SIZE COORDINATOR   a Communicator's ranks, joined by CUDA IPC
    gpu_check_worker.py cliques RANK SIZE COORDINATOR     a mesh over processes, by XLA's cliques
    gpu_check_worker.py devices                           all GPUs of one process, against lax.psum

With JAX_PLATFORMS=cpu the same code runs over the CPU backend, which proves the script itself."""

from __future__ import annotations

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxring


def say(part: str, case: str, ok: bool, detail: str = "") -> None:
    print(json.dumps({"part": part, "case": case, "ok": bool(ok), "detail": detail}), flush=True)


def seconds(f, *xs, repeats: int = 20) -> float:
    """The best of several runs, each waited for."""
    f(*xs)[0].block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(f(*xs))
        best = min(best, time.perf_counter() - begin)
    return best


def processes(rank: int, size: int, coordinator: str) -> None:
    comm = jaxring.init(rank=rank, world_size=size, coordinator=coordinator, timeout_s=60)
    for count in (1, 1000, 1 << 18):
        x = jnp.arange(count, dtype=jnp.float32) + rank
        y = np.asarray(jax.jit(lambda x: jaxring.allreduce(x, comm))(x))
        expected = size * np.arange(count, dtype=np.float32) + sum(range(size))
        say("processes", f"allreduce float32 x{count} rank {rank}", np.array_equal(y, expected))
    y = np.asarray(jax.jit(lambda x: jaxring.all_gather(x, comm))(jnp.full((3,), rank)))
    say("processes", f"all_gather rank {rank}", np.array_equal(y, np.arange(size)[:, None] + 0 * y))
    comm.close()


def cliques(rank: int, size: int, coordinator: str) -> None:
    jax.distributed.initialize(coordinator, size, rank, local_device_ids=[0])
    mesh = jax.make_mesh((size,), ("x",), axis_types=(AxisType.Auto,))
    f = jax.jit(
        jax.shard_map(
            lambda x: jaxring.allreduce(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
        )
    )
    rows = np.arange(size * 5, dtype=np.float32).reshape(size, 5)
    x = jax.make_array_from_callback(
        rows.shape, jax.sharding.NamedSharding(mesh, P("x")), lambda index: rows[index]
    )
    for _ in range(3):
        y = f(x)
    got = np.asarray(y.addressable_data(0))[0]
    say("cliques", f"allreduce rank {rank}", np.array_equal(got, rows.sum(0)), str(got))


def devices() -> None:
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,))

    def mapped(reduce):
        return jax.jit(
            jax.shard_map(
                lambda x: [reduce(x, "x")],
                mesh=mesh,
                in_specs=P("x"),
                out_specs=P(),
                check_vma=False,
            )
        )

    calls = {"jaxring": mapped(jaxring.allreduce), "lax.psum": mapped(jax.lax.psum)}
    label = os.environ.get("GPU_CHECK_LABEL", "")
    for size_bytes in (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28):
        elements = max(1, min(size_bytes, int(os.environ.get("GPU_CHECK_MOST", 1 << 28))) // 4)
        x = jnp.ones((count, elements), jnp.float32)
        for name, f in calls.items():
            if label and name == "jaxring":
                continue
            got = np.asarray(f(x)[0][0, :1])[0]
            took_s = seconds(f, x)
            ways = {row["algorithm"] for row in jaxring.stats(reset=True)} if not label else set()
            bus = 2 * (count - 1) / count * elements * 4 / took_s / 1e9
            say(
                "devices",
                f"{label or name} {elements * 4} B x{count}",
                got == count,
                f"{took_s * 1e6:.1f} us, busbw {bus:.2f} GB/s " + " ".join(sorted(ways)),
            )


def main() -> None:
    what, *rest = sys.argv[1:]
    try:
        if what == "devices":
            devices()
        else:
            rank, size, coordinator = rest
            {"processes": processes, "cliques": cliques}[what](int(rank), int(size), coordinator)
    except Exception as e:
        say(what, "ran to its end", False, f"{type(e).__name__}: {e}"[:400])
        sys.exit(1)


if __name__ == "__main__":
    main()

"""What one process of `jaxring bench` does: run each size, check results, time all contenders.

Started by bench.py as ``python -m jaxring.cli.bench_worker SPEC.json``, once per process. Each
process appends one JSON line per size to its own file; bench_table.py merges them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "ranks"
# nccl-tests' name of each op, and what it does to the ranks' values.
FOLDS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.logical_and,
    "or": np.logical_or,
}
LAX_OPS = {
    "sum": jax.lax.psum,
    "mean": jax.lax.pmean,
    "min": jax.lax.pmin,
    "max": jax.lax.pmax,
}


@dataclass(frozen=True)
class Spec:
    """What to measure; the same in every process."""

    collective: str
    sizes_bytes: tuple[int, ...]
    dtype: str
    op: str
    algorithm: str
    mode: str  # "mesh" or "communicator"
    processes: int
    devices: int  # per process
    against: str | None
    warmup: int
    rounds: int
    check: bool
    results: str  # process r writes to f"{results}.{r}"

    @property
    def ranks(self) -> int:
        return self.processes * (self.devices if self.mode == "mesh" else 1)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Spec:
        values = json.loads(path.read_text())
        return Spec(**{**values, "sizes_bytes": tuple(values["sizes_bytes"])})


@dataclass
class Contender:
    """One implementation, compiled, with its input in place."""

    name: str
    call: Callable[[Any], jax.Array]
    operand: Any
    times_s: list[float]


def values_of_rank(rank: int, count: int, dtype: np.dtype, op: str) -> np.ndarray:
    """Values whose reduction over a few ranks is exact in every dtype."""
    index = np.arange(count)
    if dtype == np.bool_:
        return (index + rank) % 3 == 0
    if op == "prod":
        return ((index + rank) % 2 + 1).astype(dtype)
    return ((index % 7 + 1) * (rank + 1)).astype(dtype)


def count_wrong(spec: Spec, count: int, result: jax.Array) -> int:
    """How many elements of this process's results differ from numpy's reduction."""
    dtype = jnp.dtype(spec.dtype)
    exact = np.dtype(np.bool_) if dtype == np.bool_ and spec.op in ("and", "or") else None
    exact = exact or np.dtype(np.float64 if jnp.issubdtype(dtype, jnp.floating) else np.int64)
    expected = values_of_rank(0, count, dtype, spec.op).astype(exact)
    for rank in range(1, spec.ranks):
        other = values_of_rank(rank, count, dtype, spec.op).astype(exact)
        expected = FOLDS[spec.op](expected, other)
    if spec.op == "mean":
        expected = expected / spec.ranks
    expected = expected.astype(result.dtype)
    return sum(int((np.asarray(s.data) != expected).sum()) for s in result.addressable_shards)


class Bench:
    """The ranks of this benchmark as seen from this process."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.comm = None
        if spec.mode == "communicator":
            import jaxring

            self.comm = jaxring.init()
        if spec.mode == "mesh" or spec.against == "lax":
            self.mesh = jax.make_mesh((jax.device_count(),), (AXIS,))

    def over_mesh(self, function: Callable[[Any], Any]) -> Callable[[Any], jax.Array]:
        return jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=P(AXIS), out_specs=P()))

    def sharded_operand(self, count: int) -> jax.Array:
        dtype = jnp.dtype(self.spec.dtype)

        def shard(index):
            rank = (index[0].start or 0) // count
            return values_of_rank(rank, count, dtype, self.spec.op)

        sharding = NamedSharding(self.mesh, P(AXIS))
        return jax.make_array_from_callback((count * self.mesh.size,), sharding, shard)

    def contenders(self, count: int) -> list[Contender]:
        """Ours first, then the peer."""
        import jaxring

        spec = self.spec
        axis = self.comm or AXIS

        def ours(x):
            return jaxring.allreduce(x, axis, spec.op, algorithm=spec.algorithm)

        sharded = None
        if spec.mode == "mesh" or spec.against == "lax":
            sharded = self.sharded_operand(count)
        if self.comm is None:
            result = [Contender("jaxring", self.over_mesh(ours), sharded, [])]
        else:
            mine = values_of_rank(self.comm.rank, count, jnp.dtype(spec.dtype), spec.op)
            result = [Contender("jaxring", jax.jit(ours), jnp.asarray(mine), [])]
        if spec.against == "lax":
            psum = LAX_OPS[spec.op]
            result.append(Contender("lax", self.over_mesh(lambda x: psum(x, AXIS)), sharded, []))
        return result

    def measure(self, size_bytes: int) -> dict[str, Any]:
        """One line of the table: medians over all rounds, contenders taking turns."""
        import jaxring

        spec = self.spec
        count = max(1, size_bytes // jnp.dtype(spec.dtype).itemsize)
        contenders = self.contenders(count)
        for contender in contenders:
            for _ in range(spec.warmup):
                contender.call(contender.operand).block_until_ready()
        jaxring.stats(reset=True)
        wrong = None
        if spec.check:
            wrong = count_wrong(spec, count, contenders[0].call(contenders[0].operand))
        for _ in range(spec.rounds):
            for contender in contenders:
                time_calls(contender, calls_per_round(size_bytes))
        ran = max(jaxring.stats(), key=lambda entry: entry["operations"], default={})
        return {
            "size_bytes": count * jnp.dtype(spec.dtype).itemsize,
            "count": count,
            "algorithm": ran.get("algorithm", "none"),
            "transport": ran.get("transport", "none"),
            "wrong": wrong,
            "calls": len(contenders[0].times_s),
            "times_us": {c.name: 1e6 * statistics.median(c.times_s) for c in contenders},
            "spread_us": {c.name: quartiles_us(c.times_s) for c in contenders},
        }


def calls_per_round(size_bytes: int) -> int:
    """Equal on all ranks, so by size and not by time."""
    return max(2, min(50, (1 << 24) // max(size_bytes, 1)))


def time_calls(contender: Contender, calls: int) -> None:
    """Times each call until its result is there, and the freeing of that result."""
    call, operand = contender.call, contender.operand
    for _ in range(calls):
        start = time.perf_counter()
        call(operand).block_until_ready()
        contender.times_s.append(time.perf_counter() - start)


def quartiles_us(times_s: list[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(times_s, n=4)
    return 1e6 * first, 1e6 * third


def main(spec_path: str) -> None:
    spec = Spec.read(Path(spec_path))
    jax.config.update("jax_platforms", "cpu")
    if jnp.dtype(spec.dtype).itemsize == 8:
        jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", spec.devices)
    bench = Bench(spec)
    rank = bench.comm.rank if bench.comm else jax.process_index()
    with open(f"{spec.results}.{rank}", "w") as file:
        for size_bytes in spec.sizes_bytes:
            file.write(json.dumps(bench.measure(size_bytes)) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1])

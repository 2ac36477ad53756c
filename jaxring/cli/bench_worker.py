"""What one process of `jaxring bench` does: run each size, check results, time all contenders.

Started by bench.py as ``python -m jaxring.cli.bench_worker SPEC.json``, once per process. Each
process appends one JSON line per size to its own file; bench_table.py merges them.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxring.cli.bench_collectives import COLLECTIVES, Kind, by_mpi4jax
from jaxring.cli.bench_contenders import Contender
from jaxring.cli.bench_mode import Mode

AXIS = "ranks"
MESH_PEERS = ("lax", "mpi")  # whose ranks are devices of a mesh; those of mpi4jax are processes
MPI_PEERS = ("mpi", "mpi4jax")  # started by mpiexec
CUT_BY_RANK = ("reduce_scatter", "all_gather", "all_to_all")


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
    chain: int = 0  # 0: whole calls; else the slope of so many dependent operations in one jit
    outputs: str = "fresh"  # or "donated", "in-place"
    leaves: int = 1  # arrays that the operand is cut into
    algorithms: tuple[str, ...] = ()  # more contenders: ours with each of these
    patience_s: float = 0.0  # of bench_mode.Mode
    slow_ns: float = 200.0  # of bench_mode.Mode

    @property
    def ranks(self) -> int:
        return self.processes * (self.devices if self.mode == "mesh" else 1)

    @property
    def kind(self) -> Kind:
        return COLLECTIVES[self.collective]

    def count_of(self, size_bytes: int) -> int:
        """Elements of the larger one of a rank's operand and result; a multiple of the ranks."""
        count = max(1, size_bytes // jnp.dtype(self.dtype).itemsize)
        return -(-count // self.ranks) * self.ranks if self.collective in CUT_BY_RANK else count

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Spec:
        values = json.loads(path.read_text())
        lists = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
        return Spec(**{**values, **lists})


def values_of_rank(rank: int, count: int, dtype: np.dtype, op: str) -> np.ndarray:
    """Values whose reduction over a few ranks is exact in every dtype."""
    index = np.arange(count)
    if dtype == np.bool_:
        return (index + rank) % 3 == 0
    if op == "prod":
        return ((index + rank) % 2 + 1).astype(dtype)
    return ((index % 7 + 1) * (rank + 1)).astype(dtype)


def count_wrong(spec: Spec, count: int, results: dict[int, np.ndarray]) -> int:
    """How many elements of the results, by rank, differ from numpy's."""
    dtype = jnp.dtype(spec.dtype)
    exact = dtype
    if spec.kind.reduces and dtype != np.bool_:
        exact = np.dtype(np.float64 if jnp.issubdtype(dtype, jnp.floating) else np.int64)
    operands = [values_of_rank(r, count, dtype, spec.op).astype(exact) for r in range(spec.ranks)]
    return sum(
        int((got != spec.kind.expected(operands, rank, spec).astype(got.dtype)).sum())
        for rank, got in results.items()
    )


class Bench:
    """The ranks of this benchmark as seen from this process."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.comm = None
        if spec.mode == "communicator":
            import jaxring

            self.comm = jaxring.init()
        self.on_mesh = spec.mode == "mesh" or spec.against in MESH_PEERS
        if self.on_mesh:
            self.mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
        self.rank = self.comm.rank if self.comm else jax.process_index()
        self.mode = Mode(spec.patience_s, self.agreed, self.rank == 0, spec.slow_ns)

    def agreed(self, word: int) -> int:
        """What process 0 says, on all."""
        if self.comm is not None:
            return self.comm.broadcast_object(word)
        if jax.process_count() == 1:
            return word
        return int(multihost_utils.broadcast_one_to_all(np.int32(word)))

    def compiled(self, function: Callable[[Any], Any], on_mesh: bool) -> Callable[[Any], Any]:
        if on_mesh:  # Each rank gives its own result: not all collectives have equal ones.
            rows = P(AXIS)
            function = jax.shard_map(
                function, mesh=self.mesh, in_specs=rows, out_specs=rows, check_vma=False
            )
        return jax.jit(function, donate_argnums=() if self.spec.outputs == "fresh" else (0,))

    def pieces(self, count: int) -> list[int]:
        """Elements of each leaf: sizes differ, as those of a model's parameters do."""
        weights = [(i % 7 + 1) ** 3 for i in range(self.spec.leaves)]
        ends = [count * sum(weights[: i + 1]) // sum(weights) for i in range(len(weights))]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def operand(self, count: int, on_mesh: bool) -> Any:
        spec, dtype = self.spec, jnp.dtype(self.spec.dtype)

        def leaf(piece: int) -> jax.Array:
            if not on_mesh:
                rank = self.comm.rank if self.comm else 0
                return jnp.asarray(values_of_rank(rank, piece, dtype, spec.op))

            def shard(index):
                rank = (index[0].start or 0) // max(1, piece)  # a leaf may be empty
                return values_of_rank(rank, piece, dtype, spec.op)

            sharding = NamedSharding(self.mesh, P(AXIS))
            return jax.make_array_from_callback((piece * self.mesh.size,), sharding, shard)

        leaves = [leaf(piece) for piece in self.pieces(count)]
        return tuple(leaves) if len(leaves) > 1 else leaves[0]

    def by_rank(self, result: Any) -> dict[int, np.ndarray]:
        """This process's results of one leaf."""
        if self.comm is not None:
            return {self.comm.rank: np.asarray(result)}
        length = max(1, result.shape[0] // self.mesh.size)
        shards = result.addressable_shards
        return {(s.index[0].start or 0) // length: np.asarray(s.data) for s in shards}

    def contender(self, name: str, call: Callable[[Any], Any], count: int, on_mesh: bool):
        spec = self.spec
        consumes = spec.outputs != "fresh"
        result = Contender(
            name,
            self.compiled(chained(call, max(1, spec.chain), spec), on_mesh),
            self.operand(count, on_mesh),
            consumes=consumes,
        )
        if spec.chain:
            result.once = self.compiled(chained(call, 1, spec), on_mesh)
        return result

    def contenders(self, count: int) -> list[Contender]:
        """Ours first, then the peer."""
        spec = self.spec
        axis = self.comm or AXIS

        def ours(x, algorithm=spec.algorithm):
            return spec.kind.ours(x, axis, replace(spec, algorithm=algorithm))

        on_mesh = self.comm is None
        result = [self.contender("jaxring", ours, count, on_mesh)]
        for name in spec.algorithms:
            call = functools.partial(ours, algorithm=name)
            result.append(self.contender(name, call, count, on_mesh))
        if spec.against:
            peer = peer_of(spec)
            on_mesh = spec.against in MESH_PEERS
            call = functools.partial(peer, axis=AXIS, spec=spec)
            result.append(self.contender(spec.against, call, count, on_mesh))
        return result

    def check(self, count: int) -> int | None:
        """The number of wrong elements of a call by itself."""
        spec = self.spec
        if not spec.check:
            return None
        alone = Bench.__new__(Bench)
        alone.__dict__ = {**self.__dict__, "spec": replace(spec, outputs="fresh", chain=0)}
        contender = alone.contenders(count)[0]
        result = contender.call(contender.operand)
        leaves = result if self.spec.leaves > 1 else (result,)
        return sum(
            count_wrong(spec, piece, self.by_rank(leaf))
            for piece, leaf in zip(self.pieces(count), leaves, strict=True)
        )

    def rounds(self, contenders: list[Contender]) -> int:
        """Contenders take turns; how many rounds met the machine's slow mode, on process 0."""

        def run() -> None:
            for contender in contenders:
                contender.take_turn()

        def forget() -> None:
            for contender in contenders:
                contender.forget_turn()

        return self.mode.rounds(self.spec.rounds, run, forget)

    def measure(self, size_bytes: int) -> dict[str, Any]:
        """One line of the table: medians over all rounds, contenders taking turns."""
        import jaxring

        spec = self.spec
        count = spec.count_of(size_bytes)
        operand_count = count // spec.ranks if spec.kind.shrinks else count
        wrong = self.check(operand_count)
        jaxring.stats(reset=True)
        with jaxring.config.override(in_place=spec.outputs == "in-place"):
            contenders = self.contenders(operand_count)
            for contender in contenders:
                contender.warm_up(spec.warmup)
                contender.calls = self.agreed(contender.calls_in_a_turn())
            # Inside too: elsewhere the setting has another value, and jit compiles anew.
            slow_rounds = self.rounds(contenders)
        ran = max(jaxring.stats(), key=lambda entry: entry["operations"], default={})
        return {
            "size_bytes": count * jnp.dtype(spec.dtype).itemsize,
            "count": count,
            "algorithm": ran.get("algorithm", "none"),
            "transport": ran.get("transport", "none"),
            "wrong": wrong,
            "calls": len(contenders[0].times_s),
            "slow_rounds": slow_rounds,
            "times_us": {c.name: c.median_us(spec.chain) for c in contenders},
            "spread_us": {c.name: c.spread_us(spec.chain) for c in contenders},
        }


def chained(call: Callable[[Any], Any], times: int, spec: Spec) -> Callable[[Any], Any]:
    """`times` operations, each on the result of the one before."""

    def again(result: Any) -> Any:
        if spec.collective == "reduce_scatter":
            return jnp.tile(result, spec.ranks)
        if spec.collective == "all_gather":
            return result[: result.shape[0] // spec.ranks]
        return result

    def function(x: Any) -> Any:
        for i in range(times):
            x = call(x if i == 0 else again(x))
        return x

    return function


def peer_of(spec: Spec) -> Callable[..., Any]:
    """The peer's version of the call: (x, axis, spec) -> result."""
    if spec.against == "mpi4jax":
        return functools.partial(by_mpi4jax, spec.collective)
    peer = spec.kind.peer
    assert peer is not None, "bench.py asks for peers that exist"
    return peer


def main(spec_path: str) -> None:
    spec = Spec.read(Path(spec_path))
    jax.config.update("jax_platforms", "cpu")
    if jnp.dtype(spec.dtype).itemsize == 8:
        jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", spec.devices)
    if spec.against == "mpi":
        jax.config.update("jax_cpu_collectives_implementation", "mpi")
    if spec.against in MPI_PEERS and spec.mode == "mesh":
        jax.distributed.initialize(cluster_detection_method="mpi4py")
    bench = Bench(spec)
    with open(f"{spec.results}.{bench.rank}", "w") as file:
        for size_bytes in spec.sizes_bytes:
            file.write(json.dumps(bench.measure(size_bytes)) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1])

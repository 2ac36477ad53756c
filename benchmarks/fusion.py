"""Times the reduction of a ResNet-50's gradients between two processes, within a training step.

    python benchmarks/fusion.py [--rounds 7]

161 leaves of 25.5 million floats in all, computed by the step itself, reduced, and subtracted from
donated parameters. In turns: by jaxring, by a lax.psum of the tree, by one lax.psum for each leaf,
and not at all; the time of the last is taken from the others, and what is left compared.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

from jaxring.testing import spawn

# (how many, shape of the kernel); a batch norm's scale and bias go with each convolution.
STAGES = ((3, 64, 256), (4, 128, 512), (6, 256, 1024), (3, 512, 2048))


def shapes() -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [(7, 7, 3, 64), (64,), (64,)]
    width = 64
    for blocks, inner, outer in STAGES:
        for block in range(blocks):
            kernels = [(1, 1, width, inner), (3, 3, inner, inner), (1, 1, inner, outer)]
            if block == 0:
                kernels.append((1, 1, width, outer))
            for kernel in kernels:
                found += [kernel, kernel[-1:], kernel[-1:]]
            width = outer
    return [*found, (2048, 1000), (1000,)]


def measured(comm: Any, rounds: int) -> dict[str, float]:
    """Median seconds of a step by each way."""
    del comm
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxring

    mesh = jax.make_mesh((jax.device_count(),), ("dp",), axis_types=(AxisType.Auto,))
    ways = {
        "jaxring": lambda tree: jaxring.allreduce_done(jaxring.allreduce_start(tree, "dp")),
        "psum of the tree": lambda tree: lax.psum(tree, "dp"),
        "psum for each leaf": lambda tree: [lax.psum(leaf, "dp") for leaf in tree],
        "no reduction": lambda tree: [lax.pcast(x, "dp", to="varying") for x in tree],
    }

    def step(way: str, params: Any, scale: Any) -> Any:
        gradients = [scale[0] * p for p in params]
        return [p - 1e-4 * g for p, g in zip(params, ways[way](gradients), strict=True)]

    def compiled(way: str) -> Any:
        specs: dict[str, Any] = {"in_specs": (P(), P("dp")), "out_specs": P(), "check_vma": False}
        f = jax.shard_map(lambda p, s: step(way, p, s), mesh=mesh, **specs)
        return jax.jit(f, donate_argnums=0)

    def placed(value: Any, spec: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])

    steps = {way: compiled(way) for way in ways}
    scale = placed(np.arange(1.0, mesh.size + 1, dtype=np.float32), P("dp"))
    params = [placed(np.ones(shape, np.float32), P()) for shape in shapes()]
    times_s: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(rounds + 1):
        for way, f in steps.items():
            start = time.perf_counter()
            params = jax.block_until_ready(f(params, scale))
            if i:
                times_s[way].append(time.perf_counter() - start)
    return {way: statistics.median(t) for way, t in times_s.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ranks = spawn(measured, 2, options.rounds, distributed=True, timeout_s=200)
    slowest_s = {way: max(rank[way] for rank in ranks) for way in ranks[0]}
    none_s = slowest_s.pop("no reduction")
    count = sum(math.prod(shape) for shape in shapes())
    print(f"{len(shapes())} leaves, {count / 1e6:.1f} M floats, 2 processes")
    print(f"a step without reduction: {1e3 * none_s:.0f} ms; with it, and what it adds:")
    ours_s = slowest_s["jaxring"] - none_s
    for way, seconds in slowest_s.items():
        added_s = seconds - none_s
        print(
            f"  {way:<20}{1e3 * seconds:6.0f} ms {1e3 * added_s:6.0f} ms  {added_s / ours_s:.2f}x"
        )


if __name__ == "__main__":
    main()

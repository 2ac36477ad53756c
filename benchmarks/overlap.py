"""Shows that gradients travel while the backward pass goes on, and what that saves.

    sudo python benchmarks/overlap.py [--rate 1gbit] [--layers 8] [--width 512] [--batch 512]

Two hosts are network namespaces of this machine with a link of the given rate, each with one
process on a core of its own. A step is forward and backward pass of a network and an SGD update;
its gradients go either in one piece when the last one is there, or in one bucket for each layer as
soon as that layer's is there. Printed are, of steps that took turns, the median times of both, of
the computation and the communication alone, and a timeline of one step of rank 0: where XLA
computed (from XLA's own profiler), and where operations of the engine were under way (from its
flight record). Both ways must give the same bits on both ranks, or it fails.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("one piece after the backward pass", "a bucket for each layer")
ALONE = ("computing alone", "communicating alone")
COLUMNS = 72
Interval = tuple[float, float]  # seconds


# -- A rank ----------------------------------------------------------------------------------------


def rank(options: argparse.Namespace) -> None:
    os.sched_setaffinity(0, {int(os.environ["JAXRING_RANK"]) % (os.cpu_count() or 1)})
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxring

    comm = jaxring.init()
    width = options.width
    rng = np.random.default_rng(0)
    shape = options.layers, width, width
    params = [jnp.float32(w) for w in rng.normal(size=shape) / np.sqrt(width)]
    rng = np.random.default_rng(1 + comm.rank)
    batch = jnp.float32(rng.normal(size=(options.batch, width)))

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def updated(params: Any, gradients: Any) -> Any:
        return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)]

    def by_layer(params: Any, x: Any) -> Any:
        return loss(jaxring.reduce_gradients_of(params, comm), x)

    def reduced(tree: Any) -> Any:
        return jaxring.allreduce(tree, comm, "mean")

    steps = {
        WAYS[0]: lambda params, x: updated(params, reduced(jax.grad(loss)(params, x))),
        WAYS[1]: lambda params, x: updated(params, jax.grad(by_layer)(params, x)),
        ALONE[0]: lambda params, x: updated(params, jax.grad(loss)(params, x)),
        ALONE[1]: lambda params, x: reduced(params),
    }
    jitted = {name: jax.jit(step) for name, step in steps.items()}

    def run(name: str) -> tuple[float, Any]:
        with jaxring.config.override(bucket_bytes=1 << 40 if name == WAYS[0] else params[0].nbytes):
            start = time.perf_counter()
            result = jax.block_until_ready(jitted[name](params, batch))
            return time.perf_counter() - start, result

    times_s: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(options.rounds + 2):  # in turns
        for name, measured in times_s.items():
            jaxring.barrier(comm)
            seconds, _ = run(name)
            if i >= 2:
                measured.append(seconds)
    bits = [b"".join(np.asarray(p).tobytes() for p in run(way)[1]) for way in WAYS]
    digests = comm.all_gather_object([hashlib.sha256(b).hexdigest() for b in bits])
    assert len({d for of_rank in digests for d in of_rank}) == 1, "the results differ"
    found: dict[str, Any] = {
        "step_s": {name: statistics.median(times) for name, times in times_s.items()},
        "timeline": {way: timeline(lambda way=way: run(way)) for way in WAYS},
    }
    jaxring.barrier(comm)
    if comm.rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


def timeline(run: Any) -> dict[str, Any]:
    """(begin, end) in seconds of XLA's work and of the engine's operations, of one run."""
    import jax

    from jaxring._src import monitor

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            marked_s = time.time()
            with jax.profiler.TraceAnnotation("mark"):
                run()
        (trace,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(trace) as file:
            events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
        record = json.loads(Path(monitor.dump(folder, "overlap")).read_text())
    (mark,) = (e for e in events if e["name"] == "mark")
    shift_s = marked_s - mark["ts"] / 1e6
    work = [
        (e["ts"] / 1e6 + shift_s, (e["ts"] + e["dur"]) / 1e6 + shift_s)
        for e in events
        if "hlo_op" in e.get("args", {}) and not e["name"].startswith("jaxring")
    ]
    wire = [
        (row["arrived_s"], row["finished_s"])
        for row in record["operations"]
        if row["arrived_s"] >= marked_s and row["finished_s"]
    ]
    begin = min(t for t, _ in work)
    return {
        "computing": [(a - begin, b - begin) for a, b in work],
        "communicating": [(a - begin, b - begin) for a, b in wire],
    }


# -- What it looked like ---------------------------------------------------------------------------


def united(intervals: list[Interval]) -> list[Interval]:
    """The same time, in intervals that do not touch."""
    result: list[Interval] = []
    for begin, end in sorted(map(tuple, intervals)):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def length_s(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in united(intervals))


def both(a: list[Interval], b: list[Interval]) -> float:
    """Seconds in which some interval of each is under way."""
    return length_s(a) + length_s(b) - length_s([*a, *b])


def drawn(intervals: list[Interval], total_s: float, mark: str) -> str:
    """One line of text: `mark` where an interval covers at least half of a column."""
    cell_s = total_s / COLUMNS
    cells = [[(i * cell_s, (i + 1) * cell_s)] for i in range(COLUMNS)]
    return "".join(mark if both(cell, intervals) >= cell_s / 2 else "." for cell in cells)


def report(found: dict[str, Any]) -> None:
    total_s = max(b for t in found["timeline"].values() for row in t.values() for _, b in row)
    for way in WAYS:
        rows, step_s = found["timeline"][way], found["step_s"][way]
        computing, communicating = rows["computing"], rows["communicating"]
        under = both(computing, communicating) / max(length_s(communicating), 1e-9)
        print(f"\n{way}: {1e3 * step_s:.1f} ms a step (median)")
        print(f"  computing      {drawn(computing, total_s, '#')}")
        print(f"  communicating  {drawn(communicating, total_s, '=')}")
        print(
            f"  communicating {1e3 * length_s(communicating):.1f} ms, {100 * under:.0f} % of it"
            f" under {1e3 * length_s(computing):.1f} ms of computing"
        )
    whole, parts, computing, communicating = (1e3 * found["step_s"][n] for n in (*WAYS, *ALONE))
    print(f"\nalone: computing {computing:.1f} ms, communicating {communicating:.1f} ms")
    print(f"no step can take less than {max(computing, communicating):.1f} ms")
    print(f"saved: {whole - parts:.1f} ms of {whole:.1f} ms ({whole / parts:.2f}x), same bits")


def hosts_module() -> Any:
    """tests/hosts/netns.py, which makes hosts of network namespaces."""
    file = Path(__file__).resolve().parent.parent / "tests" / "hosts" / "netns.py"
    spec = importlib.util.spec_from_file_location("netns", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["netns"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc takes it")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank(options)
    netns = hosts_module()
    if why := netns.why_not():
        sys.exit(f"no hosts can be made here: {why}")
    with netns.Hosts(2) as hosts:
        hosts.limit(options.rate)
        ranks = hosts.start([1, 1], __file__, "--rank", *sys.argv[1:])
        text = "".join(netns.outputs(ranks, 180))
    report(json.loads(next(netns.lines(text, "RESULT "))))
    return None


if __name__ == "__main__":
    main()

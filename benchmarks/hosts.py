"""`jaxring bench` over two hosts that are network namespaces of this machine: needs root.

    python benchmarks/hosts.py allreduce -b 16 -e 64M -f 4 --against lax [--rate 1gbit]

Options are those of `jaxring bench`; -n is the number of ranks on each host. Both hosts share this
machine's cores, so ratios say more than times.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts"))

from netns import PORT, Hosts, congestion_controls, why_not

from jaxring.cli import bench_table
from jaxring.cli.bench import environment
from jaxring.cli.bench_mode import slow_round_trip_ns
from jaxring.cli.bench_options import parse_size, sizes
from jaxring.cli.bench_worker import Spec


def run(
    spec: Spec, folder: Path, per_host: int, rate: str | None, congestion: str | None
) -> list[bench_table.Row]:
    spec.write(folder / "spec.json")
    with Hosts(2, congestion) as hosts:
        if rate:
            hosts.limit(rate)
        secret = secrets.token_hex(16)
        launcher = [sys.executable, "-m", "jaxring", "run", "--hosts", "2", "--distributed"]
        launcher += ["--coordinator", f"{hosts.address(0)}:{PORT}", "--per-host", str(per_host)]
        worker = ["-m", "jaxring.cli.bench_worker", str(folder / "spec.json")]
        both = [
            hosts.popen(
                host,
                [*launcher, "--host-rank", str(host), *worker],
                JAXRING_SECRET=secret,
                PYTHONSAFEPATH="1",  # not the source tree, where this may be run
            )
            for host in range(2)
        ]
        texts = [popen.communicate(timeout=900)[0] for popen in both]
    if any(popen.returncode for popen in both):
        sys.exit("\n".join(texts))
    files = [Path(f"{spec.results}.{rank}") for rank in range(spec.processes)]
    lines = zip(*(file.read_text().splitlines() for file in files), strict=True)
    return [bench_table.merge([json.loads(text) for text in row], spec) for row in lines]


def column(algorithm: str) -> tuple[str, int, Callable[[bench_table.Row], str]]:
    return f"{algorithm}(us)", 20, lambda row: f"{row['algorithms_us'][algorithm]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("collective")
    parser.add_argument("-n", type=int, default=1, help="ranks on each host")
    parser.add_argument("-b", default="16")
    parser.add_argument("-e", default="64M")
    parser.add_argument("-f", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--algorithms", default="", help="beside it these, for example ring,tree")
    parser.add_argument("--against", choices=["lax"])
    parser.add_argument("--mode", choices=["mesh", "communicator"], default="mesh")
    parser.add_argument("--rate", help="limit each host's link, for example 1gbit")
    parser.add_argument("--congestion", default="cubic", help="control of TCP; '': the machine's")
    parser.add_argument("--patience-s", type=float, default=10)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    if o.congestion not in ("", *congestion_controls()):
        parser.error(f"--congestion: this kernel has {', '.join(congestion_controls())}")
    if reason := why_not():
        sys.exit(f"no hosts can be made here: {reason}")
    with tempfile.TemporaryDirectory(prefix="jaxring-bench-") as folder:
        spec = Spec(
            collective=o.collective,
            sizes_bytes=sizes(parse_size(o.b), parse_size(o.e), o.f),
            dtype="float32",
            op="sum",
            algorithm=o.algorithm,
            mode=o.mode,
            processes=2 * o.n,
            devices=1,
            against=o.against,
            algorithms=tuple(filter(None, o.algorithms.split(","))),
            warmup=3,
            rounds=o.rounds,
            check=True,
            results=f"{folder}/rows",
            patience_s=o.patience_s,
            slow_ns=slow_round_trip_ns(),
        )
        rows = run(spec, Path(folder), o.n, o.rate, o.congestion or None)
    layout = [*bench_table.columns(spec), *map(column, spec.algorithms)]
    print(" ".join(title.rjust(width) for title, width, _ in layout))
    for row in rows:
        print(" ".join(text(row).rjust(width) for _, width, text in layout))
    if o.json:
        document = {"environment": environment(), "spec": asdict(spec), "rows": rows}
        o.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

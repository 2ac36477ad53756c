"""Random fault injections over 2 to 6 ranks, each followed by a right allreduce of the survivors.

    python tests/faults/soak.py --count 1000 --seed 1          # all of them
    python tests/faults/soak.py --seed 1 --only 37             # one of them again

Each injection draws its kind, moment, victim, collective and size from (seed, number) alone. After
it, every survivor must have raised the right typed error in time, naming the victim; must have made
a new communicator in the same process and got right sums from it; and must hold as many
descriptors, threads and mappings as before.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import platform
import sys
import time
from typing import Any

import soak_world
from rich.console import Console
from rich.table import Table
from soak_plan import draw

GROWTH_MIB = 30.0  # JAX's own caches settle slowly; 1 to 8 were measured in 15 injections


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first injection")
    parser.add_argument("--only", type=int, help="run this injection alone")
    parser.add_argument("--most-ranks", type=int, default=6)
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.count)
    if arguments.only is not None:
        numbers = range(arguments.only, arguments.only + 1)
    console = Console(width=150, highlight=False)
    begin, before = time.monotonic(), sorted(os.listdir("/dev/shm"))
    pool = soak_world.Pool(arguments.most_ranks, sys.stderr)
    outcomes = []
    try:
        for number in numbers:
            if arguments.minutes and time.monotonic() - begin > 60 * arguments.minutes:
                break
            outcome = soak_world.run(pool, draw(arguments.seed, number, arguments.most_ranks))
            outcomes.append(outcome)
            i = outcome.injection
            console.print(
                f"{number:4d} {i.kind:9} {i.moment:7} rank {i.victim} of {i.world_size} "
                f"{i.collective:14} {i.size:7d} {outcome.seconds:5.1f} s, "
                f"error after {outcome.latest_s:.2f} s "
                + ("ok" if not outcome.problems else f"PROBLEM: {outcome.problems}"),
                markup=False,
            )
    finally:
        pool.close()
    result = summary(outcomes, pool, before, arguments.seed, time.monotonic() - begin)
    console.print(table(outcomes))
    console.print_json(json.dumps({k: v for k, v in result.items() if k != "failures"}))
    if arguments.json:
        with open(arguments.json, "w") as f:
            json.dump(result, f, indent=1)
    return 1 if result["failures"] or result["leaks"] else 0


def summary(
    outcomes: list[Any], pool: soak_world.Pool, before: list[str], seed: int, seconds: float
) -> dict[str, Any]:
    failures = [
        {**dataclasses.asdict(o.injection), "problems": o.problems} for o in outcomes if o.problems
    ]
    leaks = leaks_of(pool.ended)
    if (now := sorted(os.listdir("/dev/shm"))) != before:
        leaks.append(f"/dev/shm: {before} became {now}")
    return {
        "seed": seed,
        "injections": len(outcomes),
        "failures": failures,
        "leaks": leaks,
        "longest_life": max((w.cycles for w in pool.ended), default=0),
        "latest_error_after_death_s": max(
            (o.latest_s for o in outcomes if "PeerError" in o.injection.expected), default=0.0
        ),
        "seconds": round(seconds),
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
    }


def leaks_of(workers: list[soak_world.Worker]) -> list[str]:
    leaks = []
    for worker in workers:
        if worker.first is None:
            continue
        for name, allowed in (("fds", 0), ("threads", 0), ("rss_mib", GROWTH_MIB)):
            grown = worker.last[name] - worker.first[name]
            if grown > allowed:
                leaks.append(f"{name}: {grown:g} more after {worker.cycles - 5} injections")
    return leaks


def table(outcomes: list[Any]) -> Table:
    """Kinds by moments: how many were right, of how many."""
    moments = ("init", "before", "during", "between", "close")
    counts: collections.Counter[tuple[str, str, bool]] = collections.Counter(
        (o.injection.kind, o.injection.moment, not o.problems) for o in outcomes
    )
    result = Table("kind", *moments, title="right of all")
    for kind in dict.fromkeys(o.injection.kind for o in outcomes):
        cells = []
        for moment in moments:
            right, wrong = counts[kind, moment, True], counts[kind, moment, False]
            cells.append(f"{right}/{right + wrong}" if right + wrong else "")
        result.add_row(kind, *cells)
    return result


if __name__ == "__main__":
    sys.exit(main())

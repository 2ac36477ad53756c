"""Random kills and freezes of ranks that train elastically, against an oracle of what they commit.

    python tests/faults/elastic_soak.py --count 100 --seed 1          # all of them
    python tests/faults/elastic_soak.py --seed 1 --only 37            # one of them again

Each run draws its world, restarts and events from (seed, number) alone. It must end well; all ranks
that have finished must have the same parameters and history of steps; and a replay of that history
by one process must give, bit for bit, the same parameters, momentum and residuals, and what any
process, also one that died since, was told to be committed after each step.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any

import elastic_steps as steps
from elastic_plan import DEADLINE_S, STEPS, Plan, draw

RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "elastic_rank.py")
LIMIT_S = 240.0
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAXRING_TIMEOUT_S": str(DEADLINE_S)}


@dataclasses.dataclass
class Outcome:
    plan: Plan
    problems: list[str]
    seconds: float
    events: list[str]
    sizes: list[int]
    text: str


def run(plan: Plan) -> Outcome:
    """Makes one run and checks it."""
    begin = time.monotonic()
    launcher = ["-P", "-m", "jaxring", "run", "-n", str(plan.ranks)]
    command = [*launcher, "--restarts", str(plan.restarts), RANK, str(plan.seed), str(plan.number)]
    job = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    problems = []
    try:
        text = job.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        job.terminate()
        text = job.communicate()[0]
        problems.append(f"has not ended within {LIMIT_S:g} s")
    rows = [json.loads(line.partition(" ")[2]) for line in text.splitlines() if '{"slot"' in line]
    if job.returncode != 0:
        problems.append(f"exit code {job.returncode}")
    history: list[Any] = []
    try:
        history = check(rows)
    except AssertionError as e:
        problems.append(str(e))
    events = [
        f"{row['event']} {row['moment']} {row['slot']}.{row['again']}"
        for row in rows
        if "event" in row
    ]
    sizes = [size for size, _ in history]
    return Outcome(plan, problems, time.monotonic() - begin, events, sizes, text)


def check(rows: list[dict[str, Any]]) -> list[Any]:
    """The history on which all agree; AssertionError says what is not as the oracle has it."""
    ended = [row for row in rows if "finished" in row]
    assert ended, "no rank has finished"
    history = ended[0]["history"]
    assert all(row["history"] == history for row in ended), "histories differ"
    assert all(size > 0 for size, _ in history), f"steps are missing: {history}"
    digests, residuals = steps.replay(history)
    for row in ended:
        assert row["digest"] == digests[-1], f"parameters of {row['slot']} are not the oracle's"
        right = residuals[row["origin"]]
        assert row["residual"] == right, f"the residual of {row['slot']} is not the oracle's"
    assert len({row["finished"] for row in ended}) == len(ended), "two ranks have one number"
    for row in rows:
        if "committed" in row:
            same = row["digest"] == digests[row["committed"] - 1]
            assert same, f"what {row['slot']}.{row['again']} had committed is lost: {row}"
    return history


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--only", type=int, help="make this run alone, and show its output")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    arguments = parser.parse_args()
    # The oracle compiles as the ranks do: with several devices in a process XLA splits an
    # elementwise loop into other parts, whose last elements it rounds otherwise.
    os.environ.update(ENVIRONMENT)
    numbers = range(arguments.first, arguments.first + arguments.count)
    if arguments.only is not None:
        numbers = range(arguments.only, arguments.only + 1)
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        plans = [draw(arguments.seed, number) for number in numbers]
        for outcome in pool.map(run, plans):
            outcomes.append(outcome)
            show(outcome, arguments.only is not None)
    result = summary(outcomes, arguments.seed, time.monotonic() - begin)
    print(json.dumps(result, indent=1))
    if arguments.json:
        with open(arguments.json, "w") as f:
            json.dump(result, f, indent=1)
    return 1 if result["failures"] else 0


def show(outcome: Outcome, in_full: bool) -> None:
    plan = outcome.plan
    if in_full or outcome.problems:
        print(outcome.text[-20_000:], flush=True)
    print(
        f"{plan.number:3d} {plan.ranks} ranks (least {plan.min_ranks}), {plan.restarts} restarts: "
        f"{', '.join(outcome.events) or 'nothing'}; sizes {''.join(map(str, outcome.sizes))}, "
        f"{outcome.seconds:.0f} s "
        + (f"PROBLEM: {outcome.problems}" if outcome.problems else "ok"),
        flush=True,
    )


def summary(outcomes: list[Outcome], seed: int, seconds: float) -> dict[str, Any]:
    events = collections.Counter(e.split()[0] for o in outcomes for e in o.events)
    grown = sum(b > a for o in outcomes for a, b in zip(o.sizes, o.sizes[1:], strict=False))
    shrunk = sum(b < a for o in outcomes for a, b in zip(o.sizes, o.sizes[1:], strict=False))
    failures = {o.plan.number: o.problems for o in outcomes if o.problems}
    return {
        "seed": seed,
        "runs": len(outcomes),
        "steps": STEPS * len(outcomes),
        "failures": failures,
        "events": dict(events),
        "worlds_grown": grown,
        "worlds_shrunk": shrunk,
        "seconds": round(seconds),
    }


if __name__ == "__main__":
    sys.exit(main())

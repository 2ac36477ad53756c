"""Runs JAX's own tests of its collectives, once with jax.lax and once with jaxring in its place.

    python tests/jax_suite/run.py CHECKOUT [--mode install] [--mode names]

CHECKOUT is a work tree of https://github.com/jax-ml/jax at the tag of the JAX that is installed;
only its tests/ folder is used. Fails if a test that passes with lax fails with jaxring, or if one
that exceptions.toml names passes. Needs `pip install absl-py pytest pytest-timeout`; takes minutes.

Modes: `install` calls jaxring.install(); `names` gives the tests a jax.lax whose psum, all_gather
and so on are jaxring's.
"""

import argparse
import collections
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = ("shard_map_test.py", "pmap_test.py")
MODES = ("install", "names")
TIMEOUT_S = 600
# Of tests that JAX generates by the hundred; each takes up to half a minute.
GENERATED_CASES = "2"
# 64 programs on one device without collectives, which take half of the time.
LEFT_OUT = "not test_forwarding_correctness"


@dataclasses.dataclass
class Run:
    """What one mode gave: outcome and text by test, operations carried by collective."""

    outcomes: dict[str, str] = dataclasses.field(default_factory=dict)
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    carried: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    sessions_ended: int = 0

    def named(self, outcome: str) -> set[str]:
        return {test for test, o in self.outcomes.items() if o == outcome}

    def summary(self) -> str:
        counts = sorted(collections.Counter(self.outcomes.values()).items())
        carried = ", ".join(f"{n} {name}" for name, n in self.carried.items())
        text = ", ".join(f"{n} {outcome}" for outcome, n in counts)
        return text + (f"; carried: {carried}" if carried else "")


def read(log: Path) -> Run:
    result = Run()
    for entry in map(json.loads, log.read_text().splitlines() if log.exists() else ()):
        if "test" in entry:
            result.outcomes[entry["test"]] = entry["outcome"]
            result.texts[entry["test"]] = entry.get("text", "the process ended, or it hung")
        else:
            result.carried.update(entry["carried"])
            result.sessions_ended += 1
    return result


def run(checkout: Path, mode: str, options: list[str], log: Path) -> Run:
    """Runs all tests, also those after one that ends the process."""
    environment = dict(
        os.environ,
        JAX_SUITE_MODE=mode,
        JAX_SUITE_LOG=str(log),
        JAXRING_TIMEOUT_S="60",
        JAXRING_FALLBACK="lax",  # as install() does, for meshes of which XLA partitions some axes
        JAX_PLATFORMS="cpu",
        JAX_NUM_GENERATED_CASES=GENERATED_CASES,
        PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent.parent)]),
        PYTHONDONTWRITEBYTECODE="1",
    )
    # Not in the checkout: `jax` must be the installed one. What JAX's own tests warn of is theirs.
    command = [
        *(sys.executable, "-m", "pytest", "-p", "suite_plugin", "-p", "no:cacheprovider"),
        *("--noconftest", "-c", os.devnull, "--import-mode=importlib", "-q", "--no-header"),
        *(
            "--tb=short",
            "--durations=20",
            "-W",
            "ignore",
            f"--timeout={TIMEOUT_S}",
            "--timeout-method=thread",
        ),
        *options,
        *(str(checkout / "tests" / file) for file in FILES),
    ]
    result = Run()
    while not result.sessions_ended:
        with open(log.with_suffix(".out"), "a") as output:
            subprocess.run(
                command, cwd=log.parent, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        begun = len(result.outcomes)
        result = read(log)
        if len(result.outcomes) == begun and not result.sessions_ended:
            sys.exit(f"pytest did not begin a test; see {log.with_suffix('.out')}")
    return result


def exceptions(mode: str) -> dict[str, str]:
    """Reason by test, for a mode."""
    with open(HERE / "exceptions.toml", "rb") as file:
        groups = tomllib.load(file)["exception"]
    return {
        test: group["reason"]
        for group in groups
        if mode in group["modes"]
        for test in group["tests"]
    }


def compare(lax: Run, ours: Run, mode: str) -> list[str]:
    """What is wrong, a line each."""
    passed, excused = lax.named("passed"), exceptions(mode)
    problems = []
    for test in sorted(passed - ours.named("passed")):
        outcome = ours.outcomes.get(test, "not run")
        if test not in excused:
            last = (ours.texts.get(test) or "").strip().splitlines()[-1:]
            problems.append(f"{outcome}: {test}: {' '.join(last)}")
    for test in sorted(excused.keys() & passed & ours.named("passed")):
        problems.append(f"passes, so that exceptions.toml need not name it: {test}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--mode", action="append", choices=MODES, help="default: both")
    parser.add_argument("-k", help="pytest's -k")
    parser.add_argument("--logs", type=Path, help="folder for logs (default: a new one)")
    parser.add_argument("--lax", type=Path, help="the log (lax.jsonl) of an earlier run to take")
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="jax_suite_"))
    logs.mkdir(parents=True, exist_ok=True)
    options = ["-k", f"({args.k}) and {LEFT_OUT}" if args.k else LEFT_OUT]
    for log in [*logs.glob("*.jsonl"), *logs.glob("*.out")]:
        log.unlink()
    checkout = args.checkout.resolve()
    lax = read(args.lax) if args.lax else run(checkout, "lax", options, logs / "lax.jsonl")
    print(f"lax: {lax.summary()}", flush=True)
    wrong = 0
    for mode in args.mode or MODES:
        ours = run(checkout, mode, options, logs / f"{mode}.jsonl")
        excused = exceptions(mode).keys() & lax.named("passed")
        both = len(lax.named("passed") & ours.named("passed"))
        print(f"{mode}: {ours.summary()}")
        print(
            f"  of {len(lax.named('passed'))} that pass with lax, {both} pass with jaxring, ",
            end="",
        )
        print(f"{len(excused)} are exceptions", flush=True)
        problems = compare(lax, ours, mode)
        print(*(f"  {problem}" for problem in problems), sep="\n")
        wrong += len(problems)
    print(f"logs: {logs}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

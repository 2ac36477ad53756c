"""Runs the emulated CUDA kernels once for each mutation of xla_ffi/cuda/mutation.h.

    python tests/cuda/mutations.py BUILD [--markdown FILE] [--jobs N]

BUILD is a folder with cuda_emulation_test and cuda_failures_test, built with ThreadSanitizer. A
mutant is caught when a test fails: by a data race, wrong values, or a rank that waits for ever.
Exit code 1 if one is not.
"""

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HEADER = Path(__file__).resolve().parents[2] / "xla_ffi" / "cuda" / "mutation.h"
# Enough to see each mutation.
RUNS = (
    ("cuda_emulation_test", "CudaEmulationRepeats.*"),
    ("cuda_failures_test", "*by_packets:*one_shot"),
)
LIMIT_S = 60
RACE_EXIT_CODE = 66


def mutations() -> dict[str, str]:
    """Name -> what it takes away, in the order of the header; the unmutated program first."""
    return dict(re.findall(r'X\((k\w+),\s*"([^"]+)"\)', HEADER.read_text()))


def without_aslr() -> list[str]:
    # GCC 12's ThreadSanitizer can't place its shadow under newer kernels' address randomisation.
    prefix = ["setarch", os.uname().machine, "-R"]
    allowed = subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0
    return prefix if allowed else []


def run_test(program: Path, tests: str, mutation: str) -> str | None:
    """What the test saw; None if it passed."""
    sanitizer = f"halt_on_error=1 exitcode={RACE_EXIT_CODE}"
    try:
        done = subprocess.run(
            [*without_aslr(), str(program), f"--gtest_filter={tests}", "--gtest_fail_fast"],
            env=dict(os.environ, JR_MUTATION=mutation, TSAN_OPTIONS=sanitizer),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "a rank waits for ever"
    return None if done.returncode == 0 else kind_of(done.returncode, done.stdout + done.stderr)


def kind_of(exit_code: int, output: str) -> str:
    race = re.search(r"WARNING: ThreadSanitizer: ([\w ]+?) \(", output)
    if race:
        return f"ThreadSanitizer: {race[1]}"
    if "without a proxy fence" in output:
        return "the emulation: no proxy fence"
    if exit_code == RACE_EXIT_CODE:
        return "ThreadSanitizer: report"
    if "gave up on rank" in output:
        return "a rank waits for ever"
    if re.search(r"rank \d+ of \d+, element \d+", output):
        return "wrong values"
    failed = re.search(r"FAILED  \] \S+?\.(\w+)", output)
    return f"test {failed[1]}" if failed else f"exit code {exit_code}"


def caught_by(build: Path, mutation: str) -> tuple[str | None, float]:
    begin = time.monotonic()
    for program, tests in RUNS:
        seen = run_test(build / program, tests, mutation)
        if seen is not None:
            return seen, time.monotonic() - begin
    return None, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table to this file as well")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()

    names = mutations()
    rows, unexpected = ["| taken away | caught by |", "|---|---|"], []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda name: caught_by(arguments.build, name), names)
        for (name, what), (seen, seconds) in zip(names.items(), results, strict=True):
            as_expected = (seen is None) == (name == "kNone")
            rows.append(f"| {what} | {seen or ('all pass' if as_expected else '**nothing**')} |")
            print(f"{rows[-1]}  {seconds:.1f} s", flush=True)
            if not as_expected:
                unexpected.append(name)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(rows) + "\n")
    if unexpected:
        print(f"not as expected: {', '.join(unexpected)}", file=sys.stderr)
        return 1
    print(f"{len(names) - 1} mutants, all caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())

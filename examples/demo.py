"""What `make demo` runs: trains the digits with lax and with jaxring, prints one table, checks it.

Every run is a process tree of its own, started just as a user would (see train_digits.py). The
exit code is 1 when a check fails: jaxring's losses must equal lax's to float tolerance and be the
same bits in a second run, and every test accuracy must be at least 0.95.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).with_name("train_digits.py")
RANKS = 4
EPOCHS = 10
MIN_ACCURACY = 0.95
# Algorithms differ in the order of summation, hence in the last bits of a loss; training amplifies
# that: relative differences of 3e-6 were seen after 10 epochs, over five seeds.
LOSS_RTOL, LOSS_ATOL = 1e-4, 1e-5
RUN_TIMEOUT_S = 240

Report = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training run."""

    collectives: str
    mode: str
    algorithm: str = "auto"
    repeat: int = 0

    def command(self, json_file: Path) -> list[str]:
        flags = [
            f"--collectives={self.collectives}",
            f"--mode={self.mode}",
            f"--algorithm={self.algorithm}",
            f"--epochs={EPOCHS}",
            f"--json={json_file}",
        ]
        if self.mode == "devices":
            return [sys.executable, str(SCRIPT), f"--devices={RANKS}", *flags]
        launcher = [sys.executable, "-m", "jaxring", "run", "-n", str(RANKS)]
        if self.mode == "mesh":
            launcher.append("--distributed")
        return [*launcher, str(SCRIPT), *flags]

    def __str__(self) -> str:
        where = f"{RANKS} devices" if self.mode == "devices" else f"{RANKS} processes ({self.mode})"
        again = ", again" if self.repeat else ""
        return f"{self.collectives} on {where}, {self.algorithm}{again}"


RUNS = [
    Run("lax", "devices"),
    Run("jaxring", "devices"),
    Run("jaxring", "devices", repeat=1),
    Run("jaxring", "devices", "ring"),
    Run("jaxring", "devices", "tree"),
    Run("lax", "mesh"),
    Run("jaxring", "mesh"),
    Run("jaxring", "mesh", repeat=1),
    Run("jaxring", "communicator"),
    Run("jaxring", "communicator", repeat=1),
]


def train(run: Run, folder: Path, console: Console) -> Report:
    json_file = folder / "report.json"
    json_file.unlink(missing_ok=True)
    start = time.monotonic()
    done = subprocess.run(
        run.command(json_file),
        stdin=subprocess.DEVNULL,
        # `-m jaxring` must not find a source tree without a native module in this folder.
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    if done.returncode:
        console.print(done.stdout + done.stderr, markup=False)
        raise SystemExit(
            f"demo: {run} failed with exit code {done.returncode}; its output is above"
        )
    console.print(f"trained {run}: {time.monotonic() - start:.0f} s", highlight=False)
    return json.loads(json_file.read_text())


def carried(report: Report) -> tuple[str, str, str, str]:
    """Algorithm, transport, MB sent by rank 0 and seconds it waited, from the engine's counters."""
    if report["collectives"] == "lax":
        return "XLA's own", "-", "-", "-"
    entries = [e for e in report["stats"] if e["collective"] == "allreduce" and e["operations"]]
    return (
        ", ".join(sorted({e["algorithm"] for e in entries})),
        ", ".join(sorted({e["transport"] for e in entries})),
        f"{sum(e['bytes_sent'] for e in entries) / 1e6:.1f}",
        f"{sum(e['wait_s'] for e in entries):.2f}",
    )


def table(reports: dict[Run, Report]) -> Table:
    result = Table(title=f"Handwritten digits, {RANKS} ranks, {len(reports)} runs", caption=CAPTION)
    for name in ("collectives", "ranks", "algorithm", "transport"):
        result.add_column(name)
    for name in ("sent MB", "wait s", "reduction ms", "step ms", "final loss", "accuracy"):
        result.add_column(name, justify="right")
    for run, report in reports.items():
        if run.repeat:
            continue
        result.add_row(
            run.collectives,
            f"{RANKS} {run.mode}",
            *carried(report),
            f"{report['reduction_ms']:.2f}",
            f"{report['step_ms']:.1f}",
            f"{report['losses'][-1]:.6f}",
            f"{report['test_accuracy']:.4f}",
        )
    return result


CAPTION = (
    "algorithm, transport, sent, wait: rank 0's counters in jaxring's engine, over the training; "
    "reduction: one allreduce of all gradients, jitted alone, median; step: median"
)


def failures(reports: dict[Run, Report]) -> list[str]:
    """What does not hold, in sentences."""
    result = []
    for run, report in reports.items():
        if report["test_accuracy"] < MIN_ACCURACY:
            result.append(f"{run}: test accuracy {report['test_accuracy']:.4f} < {MIN_ACCURACY}")
        if run.collectives == "lax":
            continue
        if not any(e["collective"] == "allreduce" and e["operations"] for e in report["stats"]):
            result.append(f"{run}: the engine's counters show no allreduce")
        peer = Run("lax", "devices" if run.mode == "devices" else "mesh")
        difference = np.abs(np.subtract(report["losses"], reports[peer]["losses"]))
        if not np.allclose(report["losses"], reports[peer]["losses"], LOSS_RTOL, LOSS_ATOL):
            result.append(f"{run}: a loss differs from lax's by {difference.max():.2g}")
        if run.repeat:
            first = reports[Run(run.collectives, run.mode, run.algorithm)]
            if any(report[key] != first[key] for key in ("losses", "params_sha256")):
                result.append(f"{run}: losses or parameters are not the bits of the first run")
    return result


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 132)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        reports = {run: train(run, Path(folder), console) for run in RUNS}
    console.print(table(reports))
    problems = failures(reports)
    for problem in problems:
        console.print(f"[red]FAILED[/red] {problem}", highlight=False)
    if not problems:
        console.print(
            "checked: jaxring's losses equal lax's to float tolerance "
            f"(rtol {LOSS_RTOL:g}, atol {LOSS_ATOL:g}), second runs are bitwise equal, "
            f"every accuracy is at least {MIN_ACCURACY}"
        )
    console.print(f"the demo took {time.monotonic() - start:.0f} s", highlight=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains the digits with each compression; prints what was sent, and how well it learned.

    python benchmarks/compression.py [--epochs 20] [--ranks 4]

Each run is `examples/train_digits.py` on the devices of one process, whose engine counts the bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_digits.py"
COMPRESSIONS = ("none", "bf16", "fp16", "int8")


def train(compression: str, epochs: int, ranks: int) -> dict[str, Any]:
    """The example's report."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, str(EXAMPLE), f"--compression={compression}", f"--json={file}"]
        command += [f"--epochs={epochs}", f"--devices={ranks}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())


def bytes_per_step(report: dict[str, Any]) -> float:
    """Sent by each rank."""
    sent = sum(row["bytes_sent"] for row in report["stats"])
    return sent / report["ranks"] / len(report["losses"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="devices of one process")
    options = parser.parse_args()
    print(
        "| compression | bytes sent a step and rank | of uncompressed | test accuracy | last loss |"
    )
    print("|---|---|---|---|---|")
    whole = 0.0
    for compression in COMPRESSIONS:
        report = train(compression, options.epochs, options.ranks)
        sent = bytes_per_step(report)
        whole = whole or sent
        print(
            f"| {compression} | {sent:,.0f} | {100 * sent / whole:.1f} % |"
            f" {100 * report['test_accuracy']:.2f} % | {report['losses'][-1]:.6f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
